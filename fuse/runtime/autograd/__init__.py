"""Training: a forward and a backward program as one node of autograd."""
