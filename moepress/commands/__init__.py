"""One file a command: its options, its call, and what it prints. Nothing heavy is imported before a command runs."""
