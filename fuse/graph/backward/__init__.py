"""A call together with its gradients, as a forward graph and a backward graph."""
