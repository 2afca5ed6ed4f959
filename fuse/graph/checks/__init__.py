"""Calls of operators that fake tensors accept and eager rejects, or that a graph cannot represent."""
