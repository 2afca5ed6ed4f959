"""Traces of real runs, of any model, and launches measured with the profiler."""
