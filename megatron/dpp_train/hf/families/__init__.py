"""Families of models: what of a Hugging Face model becomes which flag and which tensor.

One description per family; ``known`` has those of this package, and ``--family-file`` names a file
with a further one.
"""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family, Row, Sizes, row
from megatron.dpp_train.hf.families.registry import find_families

__all__ = ["Config", "Family", "Row", "Sizes", "find_families", "parts", "row"]
