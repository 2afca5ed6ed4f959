"""Python's and autograd's state that ``forward`` reads or changes."""
