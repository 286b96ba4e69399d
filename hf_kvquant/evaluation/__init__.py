"""`hf-kvquant eval`: what quantised caches cost in quality, measured through the caches themselves.

`cli.py` has the sub-commands, each of which is a module of its own. `records.py` keeps what has been measured in one
file that a second run resumes, `provenance.py` says where a number comes from, `page.py` and `plots.py` show records.
What one text has to say about a config is in `hf_kvquant/fidelity.py`.
"""
