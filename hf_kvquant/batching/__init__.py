"""Continuous batching over pages of codes: transformers schedules, this room holds and reads the cache."""
