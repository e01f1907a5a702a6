"""The Unix socket and TCP: connections, sessions, and what `status` adds."""
