"""Transforms of a model's keys and values: centres, smoothing factors, rotations, and how they get into the model."""
