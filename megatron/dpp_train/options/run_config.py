"""The settings of a run: typed attributes under Megatron's names.

:class:`Settings` are those of a command line, a file or a program. :func:`validate.validate` makes
a :class:`RunConfig` of them, which is complete and frozen. ``sections`` has the attributes.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from megatron.dpp.config import DppConfig
from megatron.dpp.flags import dpp_config
from megatron.dpp_train.options.sections.core import CoreSection
from megatron.dpp_train.options.sections.flags import FlagsSection

_Some = TypeVar("_Some", bound="Settings")


class Settings(FlagsSection, CoreSection):
    """Settings that may change. Without arguments each has its default."""

    @classmethod
    def of(
        cls: type[_Some],
        values: dict[str, Any],
        given: dict[str, str] | None = None,
        parsed: dict[str, Any] | None = None,
    ) -> _Some:
        """Settings with these values, and defaults for the rest.

        Raises:
            TypeError: a name that no setting has.
        """
        made = cls(**values)
        object.__setattr__(made, "_given", given or {})
        object.__setattr__(made, "_parsed", parsed or {})
        return made

    @property
    def given(self) -> dict[str, str]:
        """Name -> spelling of the flags that the command line has."""
        return self._given

    @property
    def parsed(self) -> dict[str, Any]:
        """Name -> value before validation."""
        return self._parsed

    @property
    def splits_backward(self) -> bool:
        """A dynamic pipeline may run weight gradients as tasks of their own; ``auto`` does not
        where layers are recomputed whole.
        """
        asked = self.dpp_split_backward
        return asked != "off" and not (asked == "auto" and self.recompute_granularity == "full")

    def draft(self) -> Settings:
        """A copy that may change."""
        return Settings.of(vars(self), dict(self.given), dict(self.parsed))

    def frozen(self) -> RunConfig:
        """A copy that cannot change.

        Raises:
            ConfigError: :class:`DppConfig` refuses a value.
        """
        return RunConfig.of(vars(self), self.given, self.parsed)


class RunConfig(Settings, frozen=True):  # type: ignore[misc]  # frozen, and its base is not
    """Settings that cannot change; assignment raises. Not all of them need be checked: a program
    makes one to start a run with.

    Raises:
        ConfigError: :class:`DppConfig` refuses a value.
    """

    def with_(self, **changes: Any) -> RunConfig:
        """A copy with some settings changed."""
        return RunConfig.of({**vars(self), **changes}, self.given, self.parsed)

    def with_given(self, flags: dict[str, tuple[str, Any]]) -> RunConfig:
        """A copy with settings that count as given: destination -> flag and value."""
        values = {name: value for name, (_, value) in flags.items()}
        spelled = {name: flag for name, (flag, _) in flags.items()}
        given, parsed = self.given | spelled, self.parsed | values
        return RunConfig.of({**vars(self), **values}, given, parsed)

    @property
    def dpp(self) -> DppConfig:
        """Settings of the dynamic pipeline."""
        config: DppConfig = self._pipeline
        return config

    def _complete(self) -> None:
        object.__setattr__(self, "_pipeline", dpp_config(self))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name}: checked settings are frozen; with_({name}=...) copies them")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: checked settings are frozen")
