"""The runtime for processors: it builds, measures and starts kernels, and calls PyTorch's libraries."""
