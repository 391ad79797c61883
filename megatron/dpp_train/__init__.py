"""Megatron training with the dynamic pipeline of ``megatron.dpp``.

    from megatron.dpp_train import RunConfig, run

    run(RunConfig(num_layers=4, hidden_size=64), processes=2)

``examples/run_config.py`` is a whole program. Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.dpp_train.launch.program import run as run
    from megatron.dpp_train.options.run_config import RunConfig as RunConfig

_HOME = {"RunConfig": "options.run_config", "run": "launch.program"}

__all__ = ["RunConfig", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
