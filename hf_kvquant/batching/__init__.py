"""Continuous batching over pages of codes: transformers schedules, this room holds and reads the cache.

What each file has:

    support, settings   which models and settings are served
    hook, manager       how transformers comes to our manager, which checks requests
    cache               pages: what a request takes, and what it gives back when it ends or is cancelled
    slots               what a request takes once: `tails` and `states`; `sinks` and `snapshots` copy parts of these
    memory              how much memory pages and slots take
    runner, batch       which requests attend together, and captured steps
    attention           attention of such a group; `state_layers` runs layers with a state
    sampling            the next token of each request, from its seed; `grammars` says which tokens are allowed
"""
