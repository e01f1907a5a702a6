"""This machine: processes, locks, logs, clocks, and who has started us."""
