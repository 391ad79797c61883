"""Estimates a run of Megatron before it starts, and chooses its layout. Needs no PyTorch.

``flags`` are Megatron's and ``--dpp-*`` flags, as ``{"--num-layers": 24, "--bf16": True}``. Flags
that are not given have Megatron's own defaults; flags that do not matter here are ignored. The
vocabulary is ``--padded-vocab-size``, else ``--vocab-size`` padded as Megatron pads it, else 50,304
words. Sequences that ``--dpp-slice-tokens`` cuts are estimated whole.
"""

from megatron.dpp_train.cost.choose import Choice, choose
from megatron.dpp_train.cost.device import Devices, find_devices, named_devices
from megatron.dpp_train.cost.estimate import describe

__all__ = ["Choice", "Devices", "choose", "describe", "find_devices", "named_devices"]
