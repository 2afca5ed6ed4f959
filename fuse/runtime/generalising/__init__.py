"""One graph for all sizes between captured ones."""
