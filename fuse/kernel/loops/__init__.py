"""Kernels of whole loops: one step as values and stages."""
