"""The passes, one a file."""
