"""Changes to a model that make its keys and values easier to quantise: smoothing, folded into weights, and rotation.

`smooth_attention` passes each of these files once:

    smoothing         what users call, and what stays on a model
    targets           which layers are calibrated, and where their factors go
    layout, origins   which weights make their keys and queries, found by running the model
    text              calibration text, in windows
    search            the centre and the factors of each layer
    folding           scales the weights, and proves that nothing else changed
    smoothing_file    the result: an object, a table and a file

`rotate_values` passes `value_rotation`, `layout` and `origins`. Both use `checks` and `observation`.
"""
