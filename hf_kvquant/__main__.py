"""The command `hf-kvquant`, also as `python -m hf_kvquant` where scripts are not on the path.

Everything it does is in `cli/`, which is imported once Ctrl-C is taken care of.
"""

from __future__ import annotations

from .common import interrupts


def main() -> int:
    """Run the command with the arguments of the process. Returns the exit code."""
    interrupts.watch()
    from .cli import main as command

    return command()


if __name__ == "__main__":
    raise SystemExit(main())
