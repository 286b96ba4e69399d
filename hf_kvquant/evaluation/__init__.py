"""`hf-kvquant eval`: what quantised caches cost in quality, measured through the caches themselves.

`cli.py` has the sub-commands, each of which is a module of its own: `perplexity.py`, `tasks.py`, `long_context.py`, and
`report.py`, which runs the others. What the first three keep of a run and say about it is in `perplexity_results.py`,
`task_results.py` and `long_results.py`; `page.py`, `html.py`, `pictures.py` and `plots.py` show it. `preparation.py`
has what all of them do before they measure, `records.py` keeps what has been measured in one file that a second run
resumes, `endings.py` says what is left of a run that ends early, `provenance.py` where a number comes from.
`windows.py`, `gate.py` and `details.py` are `perplexity.py`'s; `task_files.py`, `lm_eval_model.py` and `paired.py` are
`tasks.py`'s; `prompts.py` and `long_scores.py` are `long_context.py`'s. What one text has to say about a config is in
`hf_kvquant/fidelity.py`.
"""
