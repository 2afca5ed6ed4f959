"""One kernel for many sizes: a region as a text and numbers, and the numbers as functions of sizes."""
