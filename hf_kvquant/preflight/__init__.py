"""Judges a config for a model before it generates anything.

`check` decides, from what `signals` reads in the weights and what `divergence` measures on text; `result` words it.
`divergence` also says how much text is read, and so how long it takes; `replay` makes each run shorter. `budget` spends
bytes, for `bits`. `hint` is what `patch` says by itself.
"""
