"""Model files: reading, settings of their constants, example inputs."""
