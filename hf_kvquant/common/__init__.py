"""What every room may use: files, progress, Ctrl-C, suggestions in messages. Knows nothing of the package."""
