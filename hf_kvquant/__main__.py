"""`python -m hf_kvquant`: the command `hf-kvquant` for environments whose scripts are not on the path.

Everything it does is in `cli/`.
"""

from .cli import main

raise SystemExit(main())
