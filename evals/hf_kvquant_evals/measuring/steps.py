"""Feeds several tokens at a time, and each of them reads what it would read alone: the newest dense tokens, too."""

from __future__ import annotations

from hf_kvquant.cache.kvquant_cache import KVQuantCache
from hf_kvquant.storage.rewind import expect_crops


def read_as_single_steps(cache: KVQuantCache) -> None:
    """Give an empty cache tails with rows for windows of each query of a step, as assisted decoding does."""
    for storage in cache.storages:
        expect_crops(storage)
