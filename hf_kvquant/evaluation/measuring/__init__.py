"""Measures texts under several configs side by side, and counts what was read from codes.

`fidelity.py` compares next-token distributions, `simulation.py` computes them without a cache, `pairs.py` counts, and
`generation.py` lets presets write text.
"""
