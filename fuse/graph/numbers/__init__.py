"""Numbers that ``forward`` reads from tensors or draws, symbolic until Python needs their value."""
