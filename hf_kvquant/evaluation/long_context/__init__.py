"""`hf-kvquant eval long`: can a model still find something in a long text when its cache is quantised?

`prompts.py` writes the prompts, `measure.py` asks the model, and `results.py` aggregates and shows the answers.
"""
