"""The rules, one noun per file."""
