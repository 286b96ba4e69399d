"""The options of each command, and the checks that need no model. Nothing here imports torch or transformers."""

from . import batch, bench, calibrate, env, evaluate, generate, serve

# In the order in which `--help` lists them.
COMMANDS = (generate, serve, batch, bench, calibrate, evaluate, env)
