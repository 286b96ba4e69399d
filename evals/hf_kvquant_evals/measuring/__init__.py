"""Measures texts under several configs side by side, and counts what was read from codes."""
