"""The command `hf-kvquant eval`, which `hf_kvquant/cli/parsers/evaluate.py` finds.

`parsers.py` and `recipe_parser.py` have the options of each evaluation, and import neither torch nor transformers;
`options.py` has those that several share. `evaluate.py` and `evaluate_recipes.py` run them, and `loading.py` reads what
they measure.
"""
