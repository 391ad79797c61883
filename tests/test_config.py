"""Settings that cannot work are refused where they are made, by flag."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.dpp import ConfigError, DppConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"slots": 0}, r"DppConfig\(slots=0\): must be from 1 to 1048576"),
        ({"timeout": float("nan")}, r"DppConfig\(timeout=nan\): must be from 0.001 to 2000000.0"),
        ({"slots": 10**5000},
         r"DppConfig\(slots='a number of 16610 bits'\): must be from 1 to 1048576"),
        ({"record": "./x", "replay": "x"},
         r"replay='x'\): DppConfig\(record='./x'\) is the same file"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DppConfig(**settings)
