"""Errors of narrow dtypes, operator by operator: what they are, where they begin, and what has to stay in float32."""
