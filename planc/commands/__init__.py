"""One file a command: its arguments, what it runs, its exit code; no logic."""
