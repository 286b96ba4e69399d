"""How a model attends to a cache of ours: through the registry of transformers, or a forward of our own."""
