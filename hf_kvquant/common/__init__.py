"""What every room may use: files, progress, suggestions in messages. Knows nothing of the package."""
