"""Schedules: the loop nests that compute values."""
