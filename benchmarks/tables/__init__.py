"""The tables of README.md and docs, from the JSON files of measurements."""
