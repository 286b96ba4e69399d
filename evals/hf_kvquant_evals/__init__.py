"""Measures what quantised caches cost in quality, through the caches themselves.

- `cli/`: the command `hf-kvquant eval`.
- `measuring/`: how far next-token distributions under two caches are apart, and whether they come from codes.
- `perplexity/`, `tasks/` and `long_context/`: one evaluation each. `report/` makes a page from their records.
- `recipes/`: published ways of quantising a cache, simulated on equal terms.
- `preparation.py` makes a model ready; `injection.py` makes its keys harder to quantise.
- `records.py` keeps results in a file that a second run resumes; `provenance.py` says where they come from;
  `paired.py` has statistics of two runs over the same items.
- `choices.py` has what options offer, `errors.py` the ways in which a measurement ends without results.

Any function may raise `UsageError` for what a user typed or named, and `RefusedResult` for a measurement that fails its
own checks (`hf_kvquant/common/errors.py`); docstrings name all other errors.
"""
