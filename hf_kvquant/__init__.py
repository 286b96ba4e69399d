"""Quantised key-value caches for Hugging Face Transformers."""

__version__ = "0.1.0"
