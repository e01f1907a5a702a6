"""What the daemon keeps on disk."""
