"""Recipes: ATen operators as values."""
