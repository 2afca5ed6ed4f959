"""Programs for further sizes: graphs, schedules and calls as texts without numbers, and their numbers."""
