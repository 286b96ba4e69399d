"""`hf-kvquant eval`: what quantised caches cost in quality, measured through the caches themselves.

- `cli.py` lists the sub-commands, one module each: `perplexity.py`, `tasks.py`, `long_context.py`, and `report.py`,
  which runs the first two.
- `preparation.py` is what they share before measuring; `records.py` saves results to a file that a second run resumes;
  `counter.py` refuses numbers that did not read codes; `endings.py` reports runs that end early; `provenance.py`
  records where a number comes from.
- `windows.py`, `gate.py` and `details.py` belong to `perplexity.py`; `task_files.py`, `lm_eval_model.py`, `batches.py`
  and `paired.py` to `tasks.py`; `prompts.py` and `long_scores.py` to `long_context.py`.
- `perplexity_results.py`, `task_results.py` and `long_results.py` aggregate and print the results; `page.py`,
  `html.py`, `pictures.py` and `plots.py` make the report.

`hf_kvquant/evaluation/fidelity.py` compares one text under several configs.
"""
