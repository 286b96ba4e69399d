"""The transformers `Cache` contract over the storages."""
