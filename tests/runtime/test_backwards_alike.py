"""However backwards run, the numbers are the static schedule's: split, fused, fused while others
wait for their W, or as measured. Times are given, so that each choice is made in each run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import cases
from tests.runtime.cases import EXPERTS, LATE, OPTIMIZED, case

check = partial(cases.check, worker=Path(__file__).with_name("backward_worker.py"))
LAUNCHED, QUICK = [0.2, 1.3, 0.9], [0.2, 1.3, 0.1]
"""A rank that is launch-bound, and one that is not; W apart costs neither much."""
DEAR = [0.2, 1.05, 0.9]
"""W apart costs more than a tenth of a fused backward, even with one layer per chunk."""
AUTO: dict[str, Any] = {"inject": LATE}
WORDS: list[dict[str, Any]] = [
    {"split_backward": word, "inject": LATE} for word in ("on", "off", "stock:0", "stock:1")
]


def measured(*ranks: tuple[list[float], str]) -> dict[str, Any]:
    """The times of each rank, what it chooses by them, and steps enough."""
    return {"times": [each[0] for each in ranks], "chosen": [each[1] for each in ranks],
            "iterations": 4}  # fmt: skip


STOCK, SPLIT, FUSED = (LAUNCHED, "stock:1"), (QUICK, "on"), (DEAR, "off")
UNLIKE = measured(STOCK, (QUICK, "stock:1"), (QUICK, "off"), FUSED)
"""The members of a stage have measured other times than each other, and choose by the largest."""
LAYOUT = {"v": 2, "layers": 4}


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """A run that is measured and recorded, and one that replays it without measuring."""

    def runs(name: str) -> list[dict[str, Any]]:
        path = str(tmp_path / name)
        return [AUTO | {"record": path}, {"replay": path, "inject": "delay:2ms"}]

    return runs


def test_two_stages(kept: Any) -> None:
    """``on`` and ``off`` are in test_equality.py."""
    two, times = {"split_backward": "stock:2", "inject": LATE}, measured(STOCK, SPLIT)
    check(
        2,
        case("v1, part fused", 2, 5, *kept("v1"), **measured(FUSED, STOCK)),
        case("v2, words", 2, 4, *WORDS[2:], two, v=2, dropout=0.1, **times | {"iterations": 2}),
        case("v2", 2, 4, *kept("v2"), v=2, dropout=0.1, **times),
    )  # fmt: skip


def test_stages_of_several_ranks_choose_alike(kept: Any) -> None:
    """By the largest times of each stage; experts share a stage with the other replica."""
    check(4, case("experts", 2, 4, *kept("ep2"), ep=2, model=EXPERTS, **LAYOUT, **UNLIKE))


@pytest.mark.slow
def test_two_stages_that_fuse(kept: Any) -> None:
    check(
        2,
        case("v1", 2, 5, *kept("v1"), **measured(FUSED, FUSED)),
        case("v2, part fused", 2, 4, AUTO, v=2, **measured(FUSED, STOCK)),
    )


@pytest.mark.slow
def test_four_ranks(kept: Any) -> None:
    deep = {"v": 2, "layers": 8}
    check(
        4,
        case("p4", 4, 6, *WORDS, *kept("p4"), **measured(STOCK, SPLIT, FUSED, FUSED)),
        case("p4v2", 4, 8, *WORDS, *kept("p4v2"), **deep,
             **measured(STOCK, SPLIT, FUSED, STOCK)),
        case("tp2", 2, 4, *WORDS[2:], *kept("tp2"), tp=2, sp=True, **LAYOUT, **UNLIKE),
        case("dp2", 2, 4, *WORDS, *kept("dp2"), **LAYOUT, **OPTIMIZED,
             **measured(STOCK, FUSED, FUSED, SPLIT)),
    )  # fmt: skip
