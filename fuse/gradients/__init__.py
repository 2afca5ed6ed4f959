"""Gradients of calls whose loops are rolled, and what the forward half hands to the backward half."""
