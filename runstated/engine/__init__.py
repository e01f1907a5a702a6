"""Turns: what has come is decided on live objects, committed, and answered."""
