"""Clocks: the true offset always lies within the uncertainty that is reported."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import DataError
from megatron.dpp.report.align import Alignment, ClockOffset, align, solve
from megatron.dpp.report.reader import TraceFile, open_run
from megatron.dpp.trace.schema import TraceLayout
from tests.report.synthetic import Run, write


@pytest.mark.parametrize("seed", range(2))
def test_offsets_of_seconds_are_found_within_the_stated_uncertainty(tmp_path, seed):
    draw = random.Random(seed)
    offset = {rank: draw.randrange(-5 * 10**9, 5 * 10**9) for rank in range(4)}
    clocks = {rank: f"clock{rank}" for rank in range(4)}
    run = Run(chunks=2, seed=seed, offset=offset, clocks=clocks, jitter=0.3)
    alignment = align(open_run(write(run, tmp_path)))
    assert len(alignment.offsets) == 4
    for rank in range(4):
        found = alignment.offsets[f"clock{rank}"]
        error = abs(found.points[0][1] - (offset[0] - offset[rank]))
        assert error <= found.uncertainty_ns
        assert found.uncertainty_ns < 1_000_000


def test_iterations_align_replicas_which_exchange_no_messages(tmp_path):
    clocks, offset = dict(enumerate("abab")), {1: 3 * 10**9, 3: 3 * 10**9}
    run = Run(ranks=2, replicas=2, clocks=clocks, offset=offset)
    directory = write(run, tmp_path)
    for path in directory.glob("*.json"):
        kept = [
            line
            for line in path.read_text().splitlines(keepends=True)
            if '"cat":"send"' not in line and '"cat":"arrival"' not in line
        ]
        path.write_text("".join(kept))
    found = align(open_run(directory)).offsets["b"]
    assert abs(found.points[0][1] + 3 * 10**9) <= found.uncertainty_ns <= 10**9


def test_messages_without_a_send_time_are_paired_with_their_sends(tmp_path):
    run = Run(ranks=2, clocks={0: "a", 1: "b"}, offset={1: -(10**9)})
    directory = write(run, tmp_path)
    for path in directory.glob("*.json"):
        kept = [line for line in path.read_text().splitlines() if '"cat":"span"' not in line]
        text = "\n".join(kept).replace('"sent_ns"', '"unused"')
        path.write_text(text + "\n")
    found = align(open_run(directory)).offsets["b"]
    assert abs(found.points[0][1] - 10**9) <= found.uncertainty_ns <= 200_000


def files_on(clocks: str, starts: tuple[int, ...] = (0, 0, 0)) -> list[TraceFile]:
    """The file of each stage of a pipeline, on the clock of that letter."""
    return [
        TraceFile(
            path=Path("x"), rank=rank, device="cpu", host="h", process=1, clock=clock, run="r",
            start_ns=start, start_unix_ns=0, complete=True,
            layout=TraceLayout(
                data=0, pipeline=rank, tensor=0, data_size=1, pipeline_size=len(clocks),
                tensor_size=1,
            ),
        )
        for rank, (clock, start) in enumerate(zip(clocks, starts, strict=False))
    ]  # fmt: skip


def arrival(
    source: int, sent_ns: int, arrived_ns: int, start_ns: int = 0, iteration: int = 0
) -> dict[str, object]:
    """An arrival in the file that begins at ``start_ns``."""
    args = {"source": source, "sent_ns": sent_ns, "iteration": iteration, "microbatch": 0}
    return {"ts": (arrived_ns - start_ns) / 1000, "cat": "arrival", "name": "a", "args": args}


def aligned(
    monkeypatch: pytest.MonkeyPatch, files: list[TraceFile], found: list[list[dict[str, object]]]
) -> Alignment:
    monkeypatch.setattr(
        "megatron.dpp.report.align.read_events", lambda file, only: iter(found[file.rank])
    )
    return align(files)


@pytest.mark.parametrize("late", ["entered", "left"])
def test_of_ranks_with_one_clock_the_last_to_enter_and_the_first_to_leave_count(late, monkeypatch):
    """Rank 1 shares the clock of rank 0, and bounds that of rank 2 the closest."""
    times = {0: (0, 1000), 1: (900, 1000) if late == "entered" else (0, 100), 2: (0, 1000)}

    def events(file, only):
        enters, leaves = times[file.rank]
        args = {"iteration": 0}
        one = {"ts": enters, "dur": leaves - enters, "cat": "iteration", "name": "x", "args": args}
        return iter([one])

    monkeypatch.setattr("megatron.dpp.report.align.read_events", events)
    replicas = [
        replace(file, layout=TraceLayout(
            data=file.rank, pipeline=0, tensor=0, data_size=3, pipeline_size=1, tensor_size=1
        ))
        for file in files_on("aab")
    ]  # fmt: skip
    ((_, offset, uncertainty),) = align(replicas).offsets["b"].points
    assert abs(offset) == 450_000 and (offset > 0) == (late == "entered")
    assert uncertainty == 550_000


def test_ranks_without_messages_are_refused_by_name(tmp_path):
    run = Run(ranks=3, clocks={2: "far"})
    directory = write(run, tmp_path)
    for path in directory.glob("*.json"):
        kept = [
            line
            for line in path.read_text().splitlines(keepends=True)
            if '"direction":"backward"' not in line
        ]
        path.write_text("".join(kept))
    with pytest.raises(DataError, match=r"clocks of ranks 2 cannot be aligned"):
        align(open_run(directory))


@settings(max_examples=60)
@given(st.data())
def test_true_offsets_satisfy_every_bound_and_so_does_the_estimate(data):
    names = [f"c{i}" for i in range(data.draw(st.integers(2, 6)))]
    true = {name: data.draw(st.integers(-(10**10), 10**10)) for name in names}
    true[names[0]] = 0
    delays = st.integers(1, 10**6)
    bounds = {}
    for a, b in itertools.pairwise(names):
        bounds[a, b] = true[a] - true[b] + data.draw(delays)
        bounds[b, a] = true[b] - true[a] + data.draw(delays)
    if len(names) > 2 and data.draw(st.booleans()):
        bounds[names[0], names[-1]] = true[names[0]] - true[names[-1]] + data.draw(delays)
    found = solve(names, bounds)
    for name in names:
        assert abs(found[name][0] - true[name]) <= found[name][1]
    for (a, b), bound in bounds.items():
        assert found[a][0] - found[b][0] <= bound + 1


def test_small_contradictions_widen_the_uncertainty_and_large_ones_are_errors():
    drifted = {("a", "b"): 5_000, ("b", "a"): -9_000}
    offset, uncertainty = solve(["a", "b"], drifted)["b"]
    assert uncertainty >= 2_000
    assert -9_000 - uncertainty <= offset <= 5_000 + uncertainty
    # 2.5 us each would do; bounds are widened by 1 us, 2 us, 4 us.
    assert solve(["a", "b"], {("a", "b"): 5_000, ("b", "a"): -10_000})["b"] == (-7_500, 5_500)
    with pytest.raises(DataError, match="contradict"):
        solve(["a", "b"], {("a", "b"): 0, ("b", "a"): -10_000_000})


def test_offsets_run_straight_between_windows():
    offset = ClockOffset(((100, 10, 1), (200, 30, 2)))
    assert [offset.at(t) for t in (0, 100, 150, 200, 900)] == [10, 10, 20, 30, 30]
    assert offset.uncertainty_ns == 2


S = 10**9


def iteration(number: int, start_ns: int, end_ns: int) -> dict[str, object]:
    dur = (end_ns - start_ns) / 1000
    args = {"iteration": number}
    return {"ts": start_ns / 1000, "dur": dur, "cat": "iteration", "name": "i", "args": args}


def test_a_window_that_bounds_a_clock_from_one_side_tells_nothing_and_the_others_stay(monkeypatch):
    """Clock b is 100 s ahead, and 40 us more 20 s later. Messages take 1 us and 3 us. The second of
    three iterations, a window each, has none to clock a."""
    lead = {0: 100 * S, 1: 100 * S, 2: 100 * S + 40_000}
    begins = {0: 1 * S, 1: 12 * S, 2: 23 * S}
    to_b = [arrival(0, at, at + lead[n] + 1_000, lead[0], iteration=n) for n, at in begins.items()]
    to_a = [iteration(n, at, at + 2 * S) for n, at in begins.items()]
    to_a += [
        arrival(1, at + lead[n], at + 3_000, iteration=n) for n, at in begins.items() if n != 1
    ]
    found = aligned(monkeypatch, files_on("ab", (0, lead[0])), [to_a, to_b])
    first, third = (begins[n] + S for n in (0, 2))  # the middles on clock a
    assert found.offsets["a"].points == ((first, 0, 0), (third, 0, 0))
    one, other = 1_000 - lead[0], 1_000 - lead[2]
    assert found.offsets["b"].points == (
        (first - one, one, 2_000), (third - other, other, 2_000)
    )  # fmt: skip
    assert found.to_global(1, first - one) == first


def test_iterations_of_less_than_a_window_are_solved_together(monkeypatch):
    """The two directions are in two iterations, nine seconds apart; then in windows of their own,
    none of which bounds the clocks."""
    for apart in (9 * S, 50 * S):
        to_a = [iteration(0, 0, 2_000), arrival(1, apart, apart + 3_000, iteration=1)]
        found = aligned(monkeypatch, files_on("ab"), [to_a, [arrival(0, 0, 1_000)]])
        ((_, offset, uncertainty),) = found.offsets["b"].points
        assert (offset, uncertainty) == (1_000, 2_000)


@pytest.mark.parametrize("early", [0, 1])
def test_on_one_clock_a_message_may_arrive_when_it_was_sent_and_no_earlier(monkeypatch, early):
    files, found = files_on("aa"), [[], [arrival(0, 5_000 + early, 5_000)]]
    if not early:
        assert aligned(monkeypatch, files, found).uncertainty_ns == 0
        return
    with pytest.raises(DataError, match="a from rank 0 arrived 1 ns before it was sent"):
        aligned(monkeypatch, files, found)
