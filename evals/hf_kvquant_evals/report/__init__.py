"""`hf-kvquant eval report`: a page with pictures, made from the records of other evaluations alone."""
