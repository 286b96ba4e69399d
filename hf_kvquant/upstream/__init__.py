"""What this package knows of transformers: what differs between its releases, and what must stay as it is."""
