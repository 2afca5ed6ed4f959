"""The recording of one call, by a plan that each recording corrects."""
