"""`hf-kvquant eval perplexity`: perplexity of a text, and how far presets move its next-token distributions.

`segments.py` cuts the text into segments, `gate.py` checks that the ways of feeding a text agree, `keys.py` looks at
the keys, `measure.py` runs all of it in order, and `results.py` aggregates and shows.
"""
