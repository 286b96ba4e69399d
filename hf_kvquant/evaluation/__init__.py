"""`hf-kvquant eval`: what quantised caches cost in quality, measured through the caches themselves.

`cli.py` has the sub-commands, each of which is a module of its own. `preparation.py` makes a model harder or calibrates
it before, `records.py` keeps what has been measured in one file that a second run resumes and says what is left of a
run that ends early, `provenance.py` says where a number comes from. `windows.py`, `gate.py` and `details.py` are
`perplexity.py`'s, `page.py` and `plots.py` are `report.py`'s.
What one text has to say about a config is in `hf_kvquant/fidelity.py`.
"""
