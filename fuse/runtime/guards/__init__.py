"""Whether a compiled variant serves a call, and whether the model is still in the state that it was made in."""
