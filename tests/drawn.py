"""Reads the pictures that `plots.picture` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


def described(path: Path) -> dict[str, Any]:
    """The numbers in the description of a picture."""
    found = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    numbers: dict[str, Any] = json.loads("" if found is None or found.text is None else found.text)
    return numbers
