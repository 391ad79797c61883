"""The base of the sections of a run's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Type checkers alone need it."""
        return lambda kind: kind


UNSET: Any = None
"""Value of a setting until validation, which derives one or asks for it."""


@dataclass_transform(kw_only_default=True)
class Section:
    """Settings as attributes with their defaults.

    Type checkers treat a section as a dataclass. Python does not: to make one of 500 fields would
    take 30 ms at each start.
    """

    __slots__ = ("__dict__", "_given", "_parsed", "_pipeline")  # no settings: vars() has none
    _defaults: ClassVar[dict[str, Any]] = {}
    _given: dict[str, str]
    _parsed: dict[str, Any]
    _pipeline: Any

    def __init__(self, **values: Any) -> None:
        found = self._defaults | values
        if len(found) != len(self._defaults):
            unknown = next(name for name in values if name not in self._defaults)
            raise TypeError(f"{type(self).__name__} has no setting {unknown!r}")
        vars(self).update(found)
        for name in ("_given", "_parsed"):
            object.__setattr__(self, name, {})
        self._complete()

    def _complete(self) -> None:
        """Add what belongs to the settings and is none."""

    def __init_subclass__(cls, *, frozen: bool = False) -> None:
        """``frozen`` is for type checkers."""
        cls._defaults = {}
        for base in reversed(cls.__mro__):
            if base is not Section:
                own = getattr(base, "__annotations__", {})
                cls._defaults |= {name: getattr(base, name) for name in own}
