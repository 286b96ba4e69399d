"""An OpenAI-compatible server over pages of codes: transformers' own, with a door in front that keeps it answering.

transformers reads requests, makes prompts, schedules and writes answers. This room patches the model (`model.py`),
passes tokens on to requests that are still open (`generation.py`, `requests.py`), refuses what would stop the server
(`checks.py`, `front.py`), counts (`metrics.py`) and ends in good order (`server.py`).
"""
