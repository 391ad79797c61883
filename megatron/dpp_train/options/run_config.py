"""The settings of a run after validation: frozen, under Megatron's names."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from megatron.dpp.config import DppConfig
from megatron.dpp.flags import dpp_config


class RunConfig(argparse.Namespace):
    """Checked settings. Reading works as with argparse's namespace; assignment raises.

    Attributes:
        given: destination -> spelling of the flags on the command line.
        parsed: destination -> value before validation.
        dpp: settings of the dynamic pipeline, from the ``dpp_*`` values.

    These three are no settings: ``vars()`` leaves them out.
    """

    __slots__ = ("dpp", "given", "parsed")

    given: dict[str, str]
    parsed: dict[str, Any]
    dpp: DppConfig

    def __init__(self, values: dict[str, Any]) -> None:
        """Raises ConfigError where :class:`DppConfig` refuses a value."""
        settings = dict(values)
        for name in ("given", "parsed"):
            object.__setattr__(self, name, settings.pop(name, {}))
        vars(self).update(settings)
        object.__setattr__(self, "dpp", dpp_config(self))

    def with_(self, **changes: Any) -> RunConfig:
        """A copy with some settings changed."""
        extra = {"given": self.given, "parsed": self.parsed}
        return RunConfig({**vars(self), **extra, **changes})

    def with_given(self, flags: dict[str, tuple[str, Any]]) -> RunConfig:
        """A copy with settings that count as given: destination -> flag and value."""
        values = {name: value for name, (_, value) in flags.items()}
        spelled = {name: flag for name, (flag, _) in flags.items()}
        return self.with_(given=self.given | spelled, parsed=self.parsed | values, **values)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name}: checked settings are frozen; with_({name}=...) copies them")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: checked settings are frozen")
