"""The variants of a model: programs for states, values that Python reads, and loops that end early."""
