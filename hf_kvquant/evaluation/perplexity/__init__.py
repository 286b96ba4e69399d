"""`hf-kvquant eval perplexity`: `segments.py` cuts a text, `gate.py` and `keys.py` check, `measure.py` runs it all."""
