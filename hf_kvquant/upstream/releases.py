"""What differs between the releases of transformers that this package works with. Nothing else asks for a version.

A switch says since which release it holds. If `OLDEST` rises beyond that, the switch goes, and what it guards with it.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

# The releases that the tests run on, apart from some between them: the bound in pyproject.toml, and the pin in
# requirements.txt.
OLDEST, NEWEST = "5.17", "5.24"
TESTED = f"{OLDEST} to {NEWEST}"

VERSION: str = transformers.__version__


def is_since(release: str) -> bool:
    """Whether the installed transformers is this release, such as `"5.24"`, or a newer one."""
    return Version(VERSION).release >= Version(release).release


def is_untested() -> bool:
    """Whether the installed transformers has another minor version than `NEWEST`, and a newer one."""
    return Version(VERSION).release[:2] > Version(NEWEST).release[:2]


def described() -> str:
    """The installed version, and that it is newer than those tested if it is."""
    return f"{VERSION}, newer than those tested ({TESTED})" if is_untested() else VERSION


def explained(error: ImportError) -> ImportError:
    """An error of an import as one that names the releases that work, if it is due to a release that was not tested."""
    is_theirs = (error.name or "").partition(".")[0] == "transformers"
    if not is_theirs or (is_since(OLDEST) and not is_untested()):
        return error
    return ImportError(
        f"hf_kvquant: transformers {VERSION} lacks what this version needs ({error}). It works with {TESTED}. Install "
        "one of these, or a newer hf_kvquant.",
        name=error.name,
    )


# The name of a cache among the arguments of models and of `generate`, and in their outputs.
CACHE = "cache" if is_since("5.24") else "past_key_values"
# The names by which callers may pass one: from 5.24 on the old one works, too.
CACHE_NAMES = {CACHE, "past_key_values"}

# Whether `generate` makes the masks of static caches before a compiled step, also without a padding mask.
MAKES_MASKS_FIRST = is_since("5.18")

# Whether assisted decoding crops static caches, and compiles its steps over them.
ASSISTS_STATIC_CACHES = is_since("5.24")

# Whether layers with gradient checkpointing drop the cache in training mode, also where no gradients are taken.
CHECKPOINTING_DROPS_CACHES = not is_since("5.24")

# Since when the paged cache of continuous batching has the parts that ours replaces.
PAGES_SINCE = "5.23"
HAS_PAGES = is_since(PAGES_SINCE)

# Who calls `update` of that cache: the model, before attention, or the attention function, which gets the cache. Only
# a model hands over latents; attention gets what was made of them.
MODELS_UPDATE_PAGES_SINCE = "5.24"
DO_MODELS_UPDATE_PAGES = is_since(MODELS_UPDATE_PAGES_SINCE)

# Since when layers with a state get the cache of continuous batching, by the name that they know.
STATES_SINCE = "5.24"
HAS_STATES = is_since(STATES_SINCE)


def with_cache(cache: Any) -> dict[str, Any]:
    """A cache as the keyword argument of a model or of `generate`: `model(ids, **with_cache(cache))`."""
    return {CACHE: cache}


def cache_of(output: Any) -> Any:
    """The cache in the output of a model or of `generate`."""
    return getattr(output, CACHE)
