"""`hf-kvquant eval perplexity`.

`segments.py` cuts a text, `gate.py` checks how it is fed, `perplexity_run.py` runs it all.
"""
