"""The recipes that users can name. Each family has a file, which says where it is defined."""

from __future__ import annotations

from ..choices import RECIPE_NAMES
from . import engines, float4, kivi, kvarn, kvquant, oscar, ours, polarquant, turboquant, uniform
from .interface import Recipe

_RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for family in (ours, uniform, kivi, kvquant, turboquant, polarquant, kvarn, oscar, float4, engines)
    for recipe in family.RECIPES
}
# By name, in the order in which they are listed and run.
RECIPES: dict[str, Recipe] = {name: _RECIPES[name] for name in RECIPE_NAMES}
