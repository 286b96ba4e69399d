"""An OpenAI-compatible server over pages of codes: transformers' own, with a door in front that keeps it answering.

transformers loads models, makes prompts, schedules and has the routes. This room patches the model (`model.py`), reads
requests (`fields.py`, `handlers.py`), passes tokens on to those that are still open (`generation.py`, `requests.py`),
makes text of them (`writing.py`) and answers of that (`forms.py`), refuses what would stop the server (`front.py`),
counts (`metrics.py`) and ends in good order (`server.py`).
"""
