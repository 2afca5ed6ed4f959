"""Kernels for processors: everything that is C++, vectors, caches or OpenMP."""
