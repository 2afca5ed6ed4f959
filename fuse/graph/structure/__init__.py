"""Arguments and results: taken apart into leaves and structure, and built anew."""
