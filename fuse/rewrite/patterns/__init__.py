"""Patterns: fusions written as ordinary PyTorch functions, and a matcher that says why one did not fire."""
