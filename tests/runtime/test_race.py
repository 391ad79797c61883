"""The race of whole steps."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.__main__ import main
from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime import race
from megatron.dpp.runtime.race import FUSED, SPLIT, Race
from megatron.dpp.runtime.session import Session
from tests.runtime.cases import EXPERTS, LATE, OPTIMIZED, UNLIKE, case, check

WORKER = Path(__file__).with_name("race_worker.py")
NAMES = {None: "own", FUSED: "fused", SPLIT: "split"}


# Choices ------------------------------------------------------------------------------------------

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def call_of(chunks: int = 2, **more: Any) -> Any:
    """A training step of two pipeline ranks."""
    config = {
        "variable_seq_lengths": False, "delay_wgrad_compute": False, "recompute_granularity": None,
        "microbatch_group_size_per_vp_stage": None, "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }  # fmt: skip
    config |= {name: more.pop(name) for name in config if name in more}
    groups = SimpleNamespace(tp=ALONE, pp=SimpleNamespace(size=lambda: 2, rank=lambda: 1),
                             dp_cp=ALONE)  # fmt: skip
    usual = {
        "model": MODELS[chunks], "config": SimpleNamespace(**config), "pg_collection": groups,
        "num_microbatches": 8, "forward_only": False, "cut": None, "adjust_tensor_shapes_fn": None,
        "boundary_example": lambda: torch.zeros(1), "varies": config["variable_seq_lengths"],
    }  # fmt: skip
    return SimpleNamespace(**usual | more)


MODELS = {1: [object()], 2: [object(), object()]}


class Rank:
    """Runs steps whose ways take given seconds, beside a rank with values of its own.

    Args:
        takes: seconds of a step in each way.
        others: the largest of the other ranks where they agree on the ways: cannot run
            megatron-core's schedule, microbatches, less microbatches, unlike, defers, eager.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, others: tuple[float, ...] = (), **config: Any
    ) -> None:
        self.now, self.events, self.said = 0.0, list[str](), list[str]()
        self.takes: dict[Any, Any] = {"own": 3.0, "fused": 2.0, "split": 1.0}
        self.others, self.slow = others, 1.0
        self.num_captures, self.num_pieces, self.replays = 0, (2, 0), False
        monkeypatch.setattr(race.time, "perf_counter", lambda: self.now)
        groups = SimpleNamespace(all_reduce=self._reduce, ReduceOp=torch.distributed.ReduceOp)
        monkeypatch.setattr(race.torch, "distributed", groups)
        given: Any = self
        self.race = Race(
            DppConfig(**config), self.said.append, given, lambda: self.events.append("freed")
        )

    def _reduce(self, found: torch.Tensor, op: Any, group: Any) -> None:
        if len(found) == len(self.others):
            found.copy_(found.maximum(torch.tensor(self.others, dtype=found.dtype)))
        else:
            found[::2] *= self.slow  # seconds of the slowest rank

    def settles(self, call: Any) -> bool:
        return self.replays

    def drop_graphs(self) -> None:
        self.events.append("dropped")

    def steps(self, number: int, call: Any = None, *, tokens: float = 0.0) -> list[str]:
        """Run steps; returns their ways, with ``+`` where graphs may be replayed."""
        found, call = [], call or call_of()
        for _ in range(number):
            with self.race.step(call, {}) as way:
                name = NAMES[way]
                took = self.takes[name]
                self.now += took(number) if callable(took) else took
                self.race._tokens.append(int(tokens))
            found.append(name + "+" * (self.race.binds_graphs and not call.forward_only))
        return found


def turns(*names: str, timed: int = 2) -> list[str]:
    """The ways of a race's steps behind those of warm-up."""
    return [name for name in names for _ in range(1 + timed)]


def test_each_way_is_timed_and_the_fastest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    assert rank.steps(2) == ["split+"] * 2
    assert rank.steps(9) == turns("own", "fused", "split+") and not rank.said
    assert rank.steps(2) == ["split+"] * 2
    (line,) = rank.said
    words = "megatron-core 3000 ms, ours (fused) 2000 ms, ours (split) 1000 ms: ours (split) runs"
    assert line == f"dynamic pipeline: raced: {words}"
    assert (
        rank.race.record["race: ours (fused)"] == 2000 and "runs: ours (split)" in rank.race.record
    )
    assert not rank.events


@pytest.mark.parametrize(
    ("own", "fused", "split", "winner"),
    [
        (1.0, 1.0, 1.0, "own"), (1.009, 1.0, 1.0, "own"), (1.02, 1.0, 1.0, "fused"),
        (1.02, 1.02, 1.0, "split+"), (1.02, 1.0, 2.0, "fused"), (1.0, 2.0, 3.0, "own"),
    ],
)  # fmt: skip
def test_a_tie_goes_to_megatron_core_and_losers_are_freed(
    monkeypatch: pytest.MonkeyPatch, own: float, fused: float, split: float, winner: str
) -> None:
    rank = Rank(monkeypatch)
    rank.takes = {"own": own, "fused": fused, "split": split}
    rank.steps(11)
    assert rank.steps(3) == [winner] * 3
    assert rank.events == {"own": ["freed"], "fused": ["dropped"], "split+": []}[winner]
    evaluation, training = call_of(forward_only=True), call_of()
    assert rank.race.leaves(training) is (winner == "own")
    assert rank.steps(1, evaluation) == ["own" if winner == "own" else "fused"]
    cannot = call_of(forward_only=True, num_microbatches=7)
    assert rank.steps(1, cannot) == ["fused"], "megatron-core needs a multiple of the ranks"
    assert rank.steps(1, call_of(num_microbatches=7))[0].startswith("split" if winner == "own"
        else winner)  # fmt: skip


def test_the_first_step_and_steps_that_capture_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three steps of the last way capture graphs. Fused backwards are left out beside them."""
    rank, seconds = Rank(monkeypatch), iter([9.0, 1.0, 2.0])
    captures, rank.replays = iter([0, 0, 1, 1, 1]), True

    def split(_: int) -> float:
        rank.num_captures += next(captures, 0)
        return 5.0

    rank.takes |= {"own": lambda _: next(seconds, 0.0), "split": split}
    assert rank.steps(5)[2:] == ["own"] * 3
    assert rank.steps(5) == ["split+"] * 5 and not rank.said
    rank.steps(1)
    assert "megatron-core 1000 ms, ours (split, graphs) 5000 ms" in rank.said[0]


@pytest.mark.parametrize(
    ("others", "ways"),
    [
        ((1, 8, -8, 0, 1, 1), ["fused", "split+"]),
        ((0, 9, -8, 0, 1, 1), ["fused", "split+"]),
        ((0, 8, -7, 0, 1, 1), ["fused", "split+"]),
        ((0, 8, -8, 0, 1, 0), ["own", "fused", "split+"]),
    ],
)
def test_what_one_rank_cannot_run_is_left_out_on_all(
    monkeypatch: pytest.MonkeyPatch, others: tuple[float, ...], ways: list[str]
) -> None:
    rank = Rank(monkeypatch, others)
    assert rank.steps(2 + 3 * len(ways))[2:] == turns(*ways)


@pytest.mark.parametrize(
    ("asked", "ways"),
    [
        ({"policy": "megatron"}, ["fused", "split+"]), ({"transport": "shm"}, ["fused", "split+"]),
        ({"activation_cap": "static"}, ["fused", "split+"]),
        ({"inject": "jitter:0.3"}, ["fused", "split+"]), ({"record": "x"}, ["fused", "split+"]),
        ({"cuda_graphs": "on"}, ["fused", "split+"]), ({"cuda_graphs": "off"}, None),
        ({"length_buckets": "geometric"}, ["fused", "split+"]), ({"replay": "x"}, ["split+"]),
        ({"split_backward": "on"}, ["split+"]), ({"split_backward": "off"}, ["fused+"]),
    ],
)  # fmt: skip
def test_what_is_asked_for_stays(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], ways: list[str] | None
) -> None:
    rank = Rank(monkeypatch, **asked)
    ways = ways or ["own", "fused", "split+"]
    found = rank.steps(2 + 3 * len(ways))[2:]
    assert found == turns(*ways) and bool(rank.race._turns) == (len(ways) > 1)


@pytest.mark.parametrize(
    ("call", "runs"),
    [
        ({"chunks": 1, "num_microbatches": 5, "overlap_p2p_comm": False}, True),
        ({"overlap_p2p_comm": False}, False), ({"batch_p2p_comm": True}, False),
        ({"num_microbatches": 5}, False),
        ({"microbatch_group_size_per_vp_stage": 4}, False),
        ({"microbatch_group_size_per_vp_stage": 2}, True), ({"delay_wgrad_compute": True}, False),
        ({"adjust_tensor_shapes_fn": len}, False), ({"cut": object()}, False),
        ({"virtual_pipeline_model_parallel_size": None}, False),
        ({"chunks": 1, "virtual_pipeline_model_parallel_size": 2}, False),
    ],
)  # fmt: skip
def test_a_step_that_it_cannot_run_is_not_given_to_megatron_core(
    monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], runs: bool
) -> None:
    assert ("own" in Rank(monkeypatch).steps(5, call_of(**call))) is runs


def test_process_groups_need_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's schedule takes both or neither."""
    groups, communicator = {"pg_collection": 1}, {"p2p_communicator": 1}
    for given, runs in ((groups | communicator, True), (groups, False), (communicator, False)):
        rank, ways = Rank(monkeypatch), list[Any]()
        for _ in range(3):
            with rank.race.step(call_of(), given) as way:
                ways.append(way)
        assert (ways[2] is None) is runs


def test_unlike_steps_are_compared_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, call = Rank(monkeypatch), call_of(variable_seq_lengths=True)
    rank.takes = {"own": 10.0, "fused": 30.0, "split": 30.0}
    rank.steps(2, call)
    assert rank.steps(5, call, tokens=10.0) == turns("own", timed=4)
    rank.steps(10, call, tokens=60.0)
    assert rank.steps(1, call, tokens=10.0) == ["fused"]
    assert "megatron-core 1e+04 ms, ours (fused) 5000 ms, ours (split) 5000 ms" in rank.said[0]


def test_numbers_of_microbatches_that_vary_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.steps(1, call_of(num_microbatches=4))
    assert rank.steps(16)[1:] == turns("own", "fused", "split+", timed=4)


def test_tokens_are_counted_where_the_losses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Call:
        forward_step_func: Any
        model: Any
        config: Any
        pg_collection: Any
        forward_only: bool = False
        cut: Any = None
        num_microbatches: int = 2
        adjust_tensor_shapes_fn: Any = None
        boundary_example: Any = None
        varies: bool = True

    usual = call_of(variable_seq_lengths=True)
    rank, outputs = Rank(monkeypatch), iter([torch.zeros(2, 7), torch.zeros(2, 3, 11), {}, 4])
    given: Any = Call(lambda *_: (next(outputs), "loss"), usual.model, usual.config,
                      usual.pg_collection)  # fmt: skip
    rank.steps(1, usual)
    call = rank.race.counted(given)
    for chunk in (1, 1, 1, 0):
        assert call.forward_step_func(None, usual.model[chunk])[1] == "loss"
    assert sum(rank.race._tokens) == 14 + 6
    given.varies = False
    assert rank.race.counted(given) is given


def test_another_race_follows_steps_that_have_become_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among ways that were close. One that keeps its winner makes the next one less likely."""
    rank = Rank(monkeypatch)
    rank.takes |= {"own": 1.04, "split": 1.0, "fused": 1.2}
    rank.steps(11 + 20)
    rank.takes["split"] = 1.02
    assert set(rank.steps(40)) == {"split+"}, "2 % are no drift"
    rank.takes["split"] = 1.035
    rank.steps(20)
    assert not rank.events
    rank.takes |= {"own": 1.0}
    found = rank.steps(30)
    start = found.index("own")
    assert found[:start] == ["split+"] * start and found[start:][:6] == turns("own", "split+")
    assert set(found[start + 6 :]) == {"own"} and rank.events == ["freed"] * 2
    assert len(rank.said) == 2 and "ours (fused)" not in rank.said[1]


def test_a_race_that_changes_nothing_makes_the_next_one_less_likely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    rank.takes |= {"own": 1.04, "split": 1.0}
    rank.steps(11 + 21)
    rank.takes |= {"own": 1.081, "split": 1.04}
    assert "own" in rank.steps(60) and len(rank.said) == 2
    rank.takes |= {"own": 1.13, "split": 1.09}
    assert "own" not in rank.steps(60), "5 % do no longer begin one"


def test_another_race_follows_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.takes |= {"own": 1.04, "split": 1.0}
    rank.steps(1995)
    assert not rank.events
    assert "own" in rank.steps(60) and len(rank.said) == 2


def test_another_model_is_raced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.steps(12)
    found = rank.steps(12, call_of(1))
    assert found == ["split+", "split+", *turns("own", "fused", "split+"), "split+"]
    for _ in range(9):  # two models that take turns are never raced
        assert rank.steps(1) + rank.steps(1, call_of(1)) == ["split+"] * 2


@pytest.mark.parametrize("value", ["yes", "stock", "stock:-1", "stock:1.5", "", False, None])
def test_other_words_for_backwards_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"split_backward=.*: expected auto, on, off or stock:N"):
        DppConfig(split_backward=value)


@pytest.mark.parametrize("recorded", [SPLIT, FUSED, Backward(stock=1), Backward(stock=0)])
def test_a_replay_runs_as_the_leaders_recording_says(recorded: Backward) -> None:
    asked: list[float] = []

    def session(found: Any, largest: Any) -> Any:
        decisions = SimpleNamespace(recorded_backward=lambda rank: found)
        own = SimpleNamespace(decisions=decisions, topology=SimpleNamespace(rank=0))
        own.largest = largest
        return own

    leader = session(recorded, lambda call, value: asked.append(value) or [value])
    assert Session.recorded_backward(leader, call_of()) == recorded
    follower = session(None, lambda call, value: [max(value, *asked)])
    assert Session.recorded_backward(follower, call_of()) == recorded


# Numbers ------------------------------------------------------------------------------------------


def forced(name: str, p: int, m: int, *ways: str, **layout: Any) -> dict[str, Any]:
    """Training steps in these ways, with an evaluation after each."""
    run = {"policy": "auto"}
    more = {"ways": ways, "iterations": len(ways), "between": True}
    return case(name, p, m, run, **more | layout)


def raced(name: str, p: int, m: int, *names: str, **layout: Any) -> dict[str, Any]:
    """Steps enough for a race of these ways."""
    steps = 2 + 3 * len(names) + 2
    more = {"iterations": steps, "names": names, "raced": 1} | layout
    trace = {"trace": more.pop("trace")} if "trace" in more else {}
    return case(name, p, m, {"policy": "auto"} | trace, **more)


EVERY = ("split", "own", "fused", "own", "split", "fused", "own", "own", "split")
"""Each way after each other one."""
OURS = ("megatron-core", "ours (fused)", "ours (split)")


def kept(folder: Path, name: str) -> list[dict[str, Any]]:
    """A run whose decisions are recorded, and one that replays them."""
    path = str(folder / name)
    return [{"record": path, "inject": LATE}, {"replay": path, "inject": "delay:2ms"}]


WORDS: list[dict[str, Any]] = [
    {"split_backward": word, "inject": LATE} for word in ("on", "off", "stock:0", "stock:1")
]


def test_ways_races_words_and_replays_train_as_the_static_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations follow the winner of a race. A report names the ways that were raced."""
    trace, two = tmp_path / "trace", {"split_backward": "stock:2", "inject": LATE}
    check(
        2,
        forced("own first", 2, 4, "own", "own", "split", layers=2, dropout=0.1),
        forced("every", 2, 4, *EVERY, v=2, layers=4, dropout=0.1, overlap=True),
        forced("unlike", 2, 4, *EVERY[:4], v=2, layers=4, lengths=True, model=UNLIKE),
        raced("race", 2, 5, *OURS, layers=2, dropout=0.1, between=True, trace=str(trace)),
        raced("graphs", 2, 4, OURS[0], "ours (split, graphs)", v=2, layers=4, captures=True,
              iterations=2 + 3 + 5 + 2),
        case("v1", 2, 5, *kept(tmp_path, "v1"), iterations=9),
        case("v2", 2, 4, *WORDS[2:], two, v=2, dropout=0.1),
        worker=WORKER,
    )  # fmt: skip
    (folder,) = trace.iterdir()
    assert main(["report", str(folder)]) == 0
    found = re.search(r"Raced: megatron-core .*s.*, ours \(fused\) .*s.*, ours \(split\) .*s",
                      capsys.readouterr().out)  # fmt: skip
    assert found


@pytest.mark.slow
def test_ways_and_words_of_further_layouts(tmp_path: Path) -> None:
    more: dict[str, Any] = {"v": 2, "layers": 4}
    check(
        2,
        forced("no sync function", 2, 4, *EVERY, overlap=True, no_sync=False, layers=4),
        forced("fused products", 2, 4, *EVERY, overlap=True, fusion=True, per_token=True, **more),
        forced("part of the microbatches", 2, 4, *EVERY, partial=2, **more),
        forced("Megatron's draws", 2, 4, *EVERY, dropout=0.1, config={"task_rng": False}, layers=4),
        forced("experts", 2, 4, *EVERY, model=EXPERTS, **more),
        forced("predictions", 2, 4, *EVERY, model={"mtp_num_layers": 1}, layers=4),
        forced("one microbatch", 2, 1, *EVERY, layers=4),
        raced("recomputed", 2, 4, *OURS[:2], layers=2, recompute="full"),
        raced("unlike race", 2, 4, *OURS, layers=2, lengths=True, model=UNLIKE, iterations=19),
        worker=WORKER,
    )
    check(
        4,
        forced("p4", 4, 6, *EVERY, layers=4),
        forced("p4v2", 4, 8, *EVERY, v=2, layers=8, dropout=0.1),
        forced("optimized", 2, 4, *EVERY, gather=True, **OPTIMIZED, **more),
        forced("tensor", 2, 4, *EVERY, tp=2, sp=True, **more),
        forced("experts of two replicas", 2, 4, *EVERY, ep=2, model=EXPERTS, **more),
        raced("race of p4", 4, 8, *OURS, v=2, layers=8),
        case("p4 words", 4, 6, *WORDS, *kept(tmp_path, "p4"), iterations=9),
        case("p4v2 words", 4, 8, *WORDS, v=2, layers=8),
        case("tp2", 2, 4, *WORDS[2:], *kept(tmp_path, "tp2"), tp=2, sp=True, iterations=9, **more),
        case("dp2", 2, 4, *WORDS, **OPTIMIZED, **more),
        case("ep2", 2, 4, *kept(tmp_path, "ep2"), ep=2, model=EXPERTS, iterations=9, **more),
        worker=WORKER,
    )


def test_ways_on_four_ranks() -> None:
    case_of = forced("p4v2", 4, 8, "split", "own", "fused", "own", "split", v=2, layers=8)
    check(4, case_of, worker=WORKER)
