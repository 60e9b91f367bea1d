"""What platforms of several vendors have in common. No platform by itself."""
