"""Objects and rules: what each noun is, what its verbs do. Nothing here reads a clock, a file or a socket."""
