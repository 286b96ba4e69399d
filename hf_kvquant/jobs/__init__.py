"""Offline jobs: many requests from a file, answered through continuous batching, and resumed if they are stopped."""
