"""`hf-kvquant eval report`: a page with pictures, made from the records of other evaluations alone.

`folder.py` has the files of a report, `page.py` its text, `pictures.py` the numbers of its pictures, and `plots.py`
draws them.
"""
