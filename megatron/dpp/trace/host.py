"""Settings of a trace that the plugin records inside a host's training program."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dpp.errors import ConfigError, setting
from megatron.dpp.trace.schema import parse_iterations


@dataclass(frozen=True, kw_only=True)
class HostTrace:
    """Settings of a trace. Command lines have a flag for each field.

    Args:
        dir: of the traces.
        interval: record every n-th step.
        iterations: record these steps only, like ``3,10-12`` (from 0).
        only: record the host's own schedule, which runs as it would without the plugin.

    Raises:
        ConfigError: an interval or iterations that cannot be.
    """

    dir: str = "benchmark"
    interval: int = 1
    iterations: str | None = None
    only: bool = False

    def __post_init__(self) -> None:
        if self.interval < 1:
            what = setting("interval", self.interval, owner="HostTrace")
            raise ConfigError(f"{what}: must be at least 1", what)
        try:
            parse_iterations(self.iterations or "0")
        except ValueError as error:
            what = setting("iterations", owner="HostTrace")
            raise ConfigError(f"{what}: {error}", what) from error
