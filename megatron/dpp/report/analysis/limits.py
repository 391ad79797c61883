"""Limits for scripts: ``--fail-if 'bubble>0.25'``."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.analysis.report_data import Totals
from megatron.dpp.trace.vocabulary import IdleCause

_OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
_FORM = re.compile(r"\s*([\w.-]+)\s*(>=|<=|==|>|<)\s*([-+0-9.eE]+)\s*")


@dataclass(frozen=True)
class Limit:
    """A condition on one of the report's totals that makes a script fail."""

    name: str
    sign: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Read ``bubble>0.25``; ConfigError for anything else."""
        match = _FORM.fullmatch(text)
        try:
            return cls(match[1], match[2], float(match[3])) if match else _refuse(text)
        except ValueError:
            return _refuse(text)

    def broken(self, totals: Totals) -> str | None:
        """Says by which value the limit is broken, None when it is kept.

        ``bubble.message`` names a cause; a cause that did not occur counts as 0.

        Raises:
            ConfigError: there is no such total or cause.
        """
        name, _, cause = self.name.partition(".")
        value = getattr(totals, name, None)
        if name == "bubble" and cause:
            if cause not in set(map(str, IdleCause)):
                known = sorted(map(str, IdleCause))
                raise ConfigError(
                    f"--fail-if {self.name}: no such cause; there are {', '.join(known)}"
                )
            value = totals.bubble_by_cause.get(cause, 0.0)
        if not isinstance(value, (int, float)):
            known = sorted(key for key, v in vars(totals).items() if isinstance(v, (int, float)))
            raise ConfigError(f"--fail-if {self.name}: no such total; there are {', '.join(known)}")
        if _OPERATORS[self.sign](value, self.value):
            return f"{self.name} is {value:g} ({self.name}{self.sign}{self.value:g})"
        return None


def _refuse(text: str) -> Limit:
    raise ConfigError(f"--fail-if {text!r}: expected a total and a limit, such as bubble>0.25")
