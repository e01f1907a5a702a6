"""The database: it knows tables and no rules."""
