"""Compares published ways of quantising a cache on equal terms: the same model, text, bits and measurements.

`interface.py` says what a recipe is, `catalogue.py` lists them, and each family has a small file, which names its
source. None of them is fast or stores codes: they return what attention would see. `recipe_cache.py` puts them into a
model, `quality.py` and `drift.py` measure, `recipe_run.py` runs it all, `recipe_tables.py` and `picture.py` show it.
"""
