"""`hf-kvquant eval tasks`: zero-shot accuracy through lm-eval, each preset compared with the unquantised cache.

`data.py` knows the tasks, `lm_eval_model.py` computes log-likelihoods in batches from `batches.py`, `measure.py` runs
tasks in order, `results.py` keeps and shows their results.
"""
