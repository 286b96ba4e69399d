"""`hf-kvquant eval perplexity`: `segments.py` cuts a text, `gate.py` checks how it is fed, `measure.py` runs it all."""
