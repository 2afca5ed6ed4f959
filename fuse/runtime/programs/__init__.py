"""Programs: a graph with regions as steps over buffers, and the calls that run them."""
