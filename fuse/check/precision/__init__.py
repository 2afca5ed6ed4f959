"""Errors of narrow dtypes, operator by operator: their size, their origin, and the operators to keep in float32."""
