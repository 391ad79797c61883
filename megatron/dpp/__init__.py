"""MegatronDPP: megatron-core training with a dynamic pipeline and a transport of its own.

    from megatron.dpp import DppConfig, DppSchedule

    # In the place of what get_forward_backward_func() returns:
    with DppSchedule(DppConfig()) as forward_backward:
        losses = forward_backward(**keywords)  # those of megatron-core

Names are loaded when they are first used, so that the schedule and the simulator work without
PyTorch.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # that of typing, whose import takes longer than the rest of this file

if sys.version_info < (3, 10):  # noqa: UP036 - started from a source tree, without pip's check
    _VERSION = ".".join(map(str, sys.version_info[:3]))
    _NAME = sys.argv[0].rpartition("/")[2]
    print(
        f"{'megatron-dpp' if _NAME in ('', '-m', '-c') else _NAME}: error: Python {_VERSION} at "
        f"{sys.executable} is too old: Python 3.10 or newer is needed",
        file=sys.stderr,
    )
    sys.exit(2)

if TYPE_CHECKING:
    from typing import Any

    from megatron.dpp.config import DppConfig as DppConfig
    from megatron.dpp.errors import ConfigError as ConfigError
    from megatron.dpp.errors import DataError as DataError
    from megatron.dpp.errors import DppError as DppError
    from megatron.dpp.errors import ScheduleError as ScheduleError
    from megatron.dpp.errors import TransportError as TransportError
    from megatron.dpp.runtime.dynamic import DppSchedule as DppSchedule
    from megatron.dpp.runtime.static import StaticSchedule as StaticSchedule
    from megatron.dpp.schedule import Action as Action
    from megatron.dpp.schedule import Geometry as Geometry
    from megatron.dpp.schedule import Kind as Kind
    from megatron.dpp.schedule import Scheduler as Scheduler
    from megatron.dpp.trace import open_recorder as open_recorder
    from megatron.dpp.transport import open_transport as open_transport

_ERRORS = ("ConfigError", "DataError", "DppError", "ScheduleError", "TransportError")
_HOME = {
    **dict.fromkeys(_ERRORS, "errors"),
    **dict.fromkeys(("Action", "Geometry", "Kind", "Scheduler"), "schedule"),
    "DppConfig": "config",
    "DppSchedule": "runtime.dynamic",
    "StaticSchedule": "runtime.static",
    "open_recorder": "trace",
    "open_transport": "transport",
}

__version__ = "0.3.0"
__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
