"""Times of a model against eager, torch.compile and hand-tuned peers."""
