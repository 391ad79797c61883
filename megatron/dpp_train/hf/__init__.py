"""Models that people know: their tensors, and their ``config.json`` as Megatron's flags."""

from megatron.dpp_train.families import Sizes
from megatron.dpp_train.hf.fields import HfConfig, read_config
from megatron.dpp_train.hf.tables import Entry, Part, entries
from megatron.dpp_train.hf.write import write_config

__all__ = [
    "Entry",
    "HfConfig",
    "Part",
    "Sizes",
    "entries",
    "read_config",
    "write_config",
]
