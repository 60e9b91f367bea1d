"""Makes plugins that were written against a former contract fit this one, for a while."""
