"""Judges a config for a model before it generates anything.

`check` decides, from what `signals` reads in the weights and what `divergence` measures on text; `verdict` words it.
"""
