"""Values of tensors that ``forward`` reads: learned, selected by data, or kept as symbolic numbers."""
