"""Functions of torch, and of the user, that do something else while ``forward`` is recorded."""
