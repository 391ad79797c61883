"""The way in which backwards run, by given times. test_backwards_alike.py runs each choice."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.config import LAUNCH_BOUND_FROM, Backward, DppConfig
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.backward import Backwards, Measured, choose

SPLIT, FUSED, STOCK = Backward(), Backward(split=False), Backward(stock=1)
BOUND = 0.9
"""Share of launching of a launch-bound rank."""


@pytest.mark.parametrize(
    ("found", "chosen", "why"),
    [
        (Measured(apart=1.05, launching=0.3), SPLIT, "launching takes 30%"),
        (Measured(apart=1.05, launching=BOUND), STOCK, "launching takes 90%"),
        (Measured(apart=1.1, launching=BOUND), STOCK, "launching takes 90%"),
        (Measured(launching=LAUNCH_BOUND_FROM), STOCK, "launching takes"),
        (Measured(apart=1.11, launching=BOUND), FUSED, r"\+11 % of a fused"),
        (Measured(apart=1.11, launching=0.3), FUSED, r"\+11 % of a fused"),
        (Measured(apart=1.05, pays=1.04, launching=BOUND), FUSED, r"\+5 % of a fused"),
        (Measured(apart=1.11, pays=1.2, launching=BOUND), FUSED, r"\+11 % of a fused"),
        (Measured(apart=1.5, launching=BOUND, unlike=True), SPLIT, "differ in length"),
        (Measured(apart=1.5, launching=BOUND, replayed=True), SPLIT, "CUDA graphs"),
    ],
)
def test_a_choice_follows_from_what_was_measured(
    found: Measured, chosen: Backward, why: str
) -> None:
    backward, said = choose(found)
    assert backward == chosen
    assert re.search(why, said)


def test_layers_that_are_recomputed_whole_have_fused_backwards() -> None:
    """A deferred weight gradient kept ten times what an activation did, and counted as one."""
    rank = Rank(*laps(1.0))
    rank.call.config.recompute_granularity = "full"
    assert rank.steps(2) == [FUSED, FUSED]
    (said,) = rank.said
    assert "asks for little memory" in said
    assert rank.steps(1, split_backward="on") == [SPLIT]


class Rank:
    """A stage of one rank whose laps are given."""

    def __init__(
        self, *laps: Any, share: float = BOUND, recorded: Any = None, ranks: int = 2
    ) -> None:
        self._laps, self.said = list(laps), list[str]()
        self.asked: list[tuple[float, ...]] = []
        decisions = SimpleNamespace(recorded_backward=lambda rank: recorded)
        self.session: Any = SimpleNamespace(
            largest=self._largest, decisions=decisions,
            topology=SimpleNamespace(rank=0, num_ranks=ranks),
            timer=SimpleNamespace(lap=lambda: self._laps.pop(0), launch_share=lambda _: share),
        )  # fmt: skip
        self.call: Any = SimpleNamespace(config=SimpleNamespace(), num_microbatches=8, cut=None)

    def _largest(self, call: Any, *values: float) -> list[float]:
        self.asked.append(values)
        return list(values)

    def steps(
        self, number: int, backwards: Backwards | None = None, *,
        replays: bool = False, pieces: tuple[int, ...] = (4, 0), **config: Any,
    ) -> list[Backward]:  # fmt: skip
        backwards = backwards or Backwards(DppConfig(**config), self.said.append)
        return [
            backwards.of_step(self.call, self.session, pieces, lambda: replays)
            for _ in range(number)
        ]


def laps(apart: float, fused: float = 10.0) -> list[dict[tuple[str, int], float]]:
    """Of four steps: B takes 6 and each of 4 pieces of W ``apart``. Chunk 1 has no pieces."""
    times = {("B", 0): 6.0, ("W", 0): apart, ("B", 1): 9.0}
    first = {key: 50 * took for key, took in times.items()}  # it allocates, and is not counted
    return [{}, first, {("B", 0): fused}, times]


@pytest.mark.parametrize(
    ("apart", "ranks", "chosen"),
    [(1.0, 2, STOCK), (1.24, 8, STOCK), (1.24, 2, FUSED), (1.3, 8, FUSED)],
)
def test_one_step_is_fused_one_is_not_and_then_a_choice_is_made(
    apart: float, ranks: int, chosen: Backward
) -> None:
    """On few ranks there is less of a cool-down that W could fill."""
    rank = Rank(*laps(apart), ranks=ranks)
    assert rank.steps(5) == [SPLIT, FUSED, SPLIT, chosen, chosen]
    ((ratio, pays, share, unlike),) = rank.asked
    assert (ratio, share, unlike) == (pytest.approx((6 + 4 * apart) / 10), BOUND, 0.0)
    assert pays == pytest.approx(1 + 2 * (ranks - 1) / (2 * 8) * 4 * apart / 10)
    (line,) = rank.said
    assert "split_backward" in line and str(chosen) in line


@pytest.mark.parametrize(
    ("others", "chosen"),
    [((1.3, 0, 0, 0), FUSED), ((0, 0, 0, 1), SPLIT), ((0, 0, BOUND, 0), STOCK), ((0,) * 4, SPLIT)],
)
def test_a_stage_chooses_by_the_largest_values_of_its_ranks(
    others: tuple[float, ...], chosen: Backward
) -> None:
    rank = Rank(*laps(1.0), share=0.2)
    rank.session.largest = lambda call, *own: list(map(max, own, others))
    assert rank.steps(4)[-1] == chosen


def test_graphs_and_unlike_lengths_keep_weight_gradients_apart() -> None:
    replayed = Rank(*laps(9.0))
    assert replayed.steps(2, replays=True) == [SPLIT, FUSED] and not replayed.said
    replayed = Rank(*laps(9.0))
    assert replayed.steps(4, replays=True)[2:] == [SPLIT, SPLIT]
    assert "CUDA graphs" in replayed.said[0]
    varying = Rank(*laps(9.0))
    varying.call.config.variable_seq_lengths = True
    assert varying.steps(4)[-1] == SPLIT
    seen = Rank(*laps(9.0))
    backwards = Backwards(DppConfig(), print)
    seen.steps(3, backwards)
    backwards.unlike = True
    assert seen.steps(1, backwards) == [SPLIT]


def test_what_was_not_measured_depends_on_launching_alone() -> None:
    """As with one microbatch per step."""
    assert Rank({}, {}, {}, {}).steps(4)[-1] == STOCK
    assert Rank({}, {}, {}, {}, share=0.2).steps(4)[-1] == SPLIT


def test_a_cpu_launches_nothing_and_measures_nothing() -> None:
    rank = Rank(None)
    assert rank.steps(3) == [SPLIT] * 3 and not rank.said and not rank.asked


@pytest.mark.parametrize(
    ("word", "found"),
    [("on", SPLIT), ("off", FUSED), ("stock:0", Backward(stock=0)), ("stock:1", STOCK)],
)
def test_a_word_is_obeyed_without_measuring(word: str, found: Backward) -> None:
    assert Rank().steps(3, split_backward=word) == [found] * 3


@pytest.mark.parametrize("recorded", [SPLIT, FUSED, STOCK, Backward(stock=0)])
def test_a_replay_runs_as_the_leaders_recording_says(recorded: Backward) -> None:
    leader = Rank(recorded=recorded)
    assert leader.steps(2, replay="x") == [recorded] * 2
    follower = Rank()
    told = max(values[0] for values in leader.asked)
    follower.session.largest = lambda call, *values: [max(told, *values)]
    assert follower.steps(1, replay="x") == [recorded]


@pytest.mark.parametrize("value", ["yes", "stock", "stock:-1", "stock:1.5", "", False, None])
def test_other_words_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"split_backward=.*: expected auto, on, off or stock:N"):
        DppConfig(split_backward=value)


def test_infinity_stands_for_never() -> None:
    assert Backward.of("on") == Backward(True, math.inf) and Backward.of("auto") is None
