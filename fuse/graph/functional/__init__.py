"""The functional form of what is recorded: bases and aliases, templates of repeated calls, steps left out."""
