"""The runstate client library."""

__version__ = "0.1.0"
