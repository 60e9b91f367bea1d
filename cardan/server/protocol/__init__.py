"""Request bodies of the HTTP dialects: shapes and field checks, no engine."""
