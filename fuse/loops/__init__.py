"""Loops: prove that a stretch of a graph is an unrolled loop, and build the loop."""
