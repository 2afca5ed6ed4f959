"""Gradients of calls whose loops are rolled, and the tensors saved for the backward graph."""
