"""The command line: one file a command group; heavy modules are imported inside commands."""
