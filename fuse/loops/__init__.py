"""Loops: proof that a stretch of a graph is a loop unrolled, and what is made of it."""
