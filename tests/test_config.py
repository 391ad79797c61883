"""Settings that cannot work are refused where they are made, by flag."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.dpp import ConfigError, DppConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slots": 0}, r"DppConfig\(slots=0\): must be at least 1, and finite"),
        (
            {"timeout": float("nan")},
            r"DppConfig\(timeout=nan\): must be at least 0.001, and finite",
        ),
        (
            {"lookahead": float("inf")},
            r"DppConfig\(lookahead=inf\): must be at least -1.0, and finite",
        ),
        (
            {"record": "./x", "replay": "x"},
            r"record='./x'\) and DppConfig\(replay='x'\) name one file",
        ),
    ],
)
def test_refusals_name_the_field(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DppConfig(**settings)
