"""`hf-kvquant eval report`: a page with pictures, made from the records of other evaluations alone.

`page.py` writes the page, `pictures.py` has the numbers of its pictures, and `plots.py` draws them.
"""
