"""Pictures of a graph before and after: dot, SVG and HTML."""
