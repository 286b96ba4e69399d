"""What a model of transformers is: its configs, and how it is divided over processes. Knows no caches."""
