"""`hf-kvquant eval long`: can a model still find something in a long text when its cache is quantised?"""
