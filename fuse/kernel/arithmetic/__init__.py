"""Arithmetic of kernels: sizes, indices, and typed scalar expressions."""
