"""Families of models: what of a Hugging Face model becomes which flag and which tensor.

``known`` has a module for each, or for several that are alike.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from megatron.dpp_train.hf.families import known, parts
from megatron.dpp_train.hf.families.base import Config, Family, Row, Sizes, row

__all__ = ["Config", "Family", "Row", "Sizes", "find_families", "parts", "row"]


@functools.cache
def find_families() -> Mapping[str, Family]:
    """Name -> family, of all modules of ``known``."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(known.__path__):
        content = vars(importlib.import_module(f"{known.__name__}.{module.name}"))
        found |= {each.name: each for each in content.values() if isinstance(each, Family)}
    return found
