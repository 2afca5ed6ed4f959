"""What builds, measures and starts kernels on processors, and the libraries that PyTorch has there."""
