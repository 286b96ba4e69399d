"""What codes mean: byte layouts, transforms of keys, and the reference that defines every number."""
