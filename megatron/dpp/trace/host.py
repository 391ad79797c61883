"""Settings of a trace that the plugin records inside a host's training program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.dpp.errors import ConfigError, setting
from megatron.dpp.trace.schema import parse_iterations


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class HostTrace:
    """Settings of a trace. Command lines have a flag for each field.

    Raises:
        ConfigError: an interval or iterations that cannot be.
    """

    dir: str = _option("benchmark", "directory of the traces")
    interval: int = _option(1, "record every n-th step")
    iterations: str | None = _option(None, "record these steps only, like 3,10-12 (from 0)")
    only: bool = _option(
        False, "record the host's own schedule, which runs as it would without the plugin"
    )

    def __post_init__(self) -> None:
        if self.interval < 1:
            what = setting("interval", self.interval, owner="HostTrace")
            raise ConfigError(f"{what}: must be at least 1", what)
        try:
            parse_iterations(self.iterations or "0")
        except ValueError as error:
            what = setting("iterations", owner="HostTrace")
            raise ConfigError(f"{what}: {error}", what) from error
