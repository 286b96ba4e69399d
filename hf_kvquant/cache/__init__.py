"""The transformers `Cache` contract over the storages.

What each file has:

    cache, layers       the contract: update, crop, reorder, sizes of masks
    handle, shown       what `update` returns in place of keys and values, and what `layer.keys` shows
    states              layers with a recurrent state
    steps               forwards that ended early, and how they are undone
    support             which models and transformers' caches can be served
    file, saved_layer   saved caches; `identity` says which model one belongs to
"""
