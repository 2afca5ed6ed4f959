"""New sizes: whether a call of a size that was not met before gets a program, or runs eager."""
