"""Families of models: what of a Hugging Face model becomes which flag and which tensor.

One module describes a family. ``known`` has those of this package. A package of one's own adds
further ones by an entry point of the group ``megatron_dpp.families``, and ``--family-file`` names a
file with one.
"""

from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family, Row, Sizes, row
from megatron.dpp_train.hf.families.registry import ENTRY_POINTS, find_families

__all__ = ["ENTRY_POINTS", "Config", "Family", "Row", "Sizes", "find_families", "parts", "row"]
