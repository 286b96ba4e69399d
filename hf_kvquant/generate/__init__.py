"""What `generate` needs beyond a cache."""
