"""Judges a config for a model before it generates anything."""
