"""The `tailor` commands: each parses its options and calls the part that does the work."""
