"""`hf-kvquant eval long`: can a model still find something in a long text when its cache is quantised?

`prompts.py` writes the prompts, `scores.py` asks the model, `measure.py` does so for all of them, and `results.py`
aggregates and shows the answers.
"""
