"""An OpenAI-compatible server over pages of codes: transformers' own, with a door in front that keeps it answering.

transformers loads models, schedules and has the routes. This room patches the model (`model.py`), reads requests
(`fields.py`, `handlers.py`), makes prompts of chats (`chats.py`, `tools.py`) and grammars of what answers must match
(`structured.py`), passes tokens, which `batching/sampling.py` draws from a request's seed, on to those that are still
open (`generation.py`, `requests.py`), makes text and calls of them (`writing.py`, `reading.py`) and answers of that
(`forms.py`), refuses what would stop the server (`front.py`), counts (`metrics.py`) and ends in order (`server.py`).
`/v1/responses` asks for a chat in another form (`responses.py`) and gets it in another form (`response_form.py`).
`chat.html` is the page at `/`.

`jobs` reads and answers lines of OpenAI's batches with `fields.py`, `chats.py`, `writing.py` and `forms.py`. These, and
what they import, need no package of the server's. `load.py` is the other side: it asks a server, ours or another one.
"""
