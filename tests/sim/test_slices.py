"""The cut of a batch, and its gain in the simulator."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.lengths import LengthCosts, sft
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.sim.slice_arms import SLICED, STATIC, STATIC_SLICED, Comparison
from megatron.dpp.sim.slices import (
    Row,
    SlicedPipeline,
    cut,
    groups_of,
    ordered,
    row_cost,
    tokens_for,
)
from megatron.dpp.sim_command import main
from megatron.dpp.slice_sizes import auto_tokens

COSTS = LengthCosts.transformer()


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.sampled_from([128, 320, 640]))
def test_a_cut_holds_every_token_once_in_slices_of_like_size(lengths, tokens):
    rows = cut(lengths, tokens, COSTS, multiple=4)
    assert sorted(i for row in rows for i in row.sequences) == list(range(len(lengths)))
    for row in rows:
        assert row.lengths == tuple(lengths[i] for i in row.sequences)
        starts = (0, *row.ends[:-1])
        sizes = [end - start for start, end in zip(starts, row.ends, strict=True)]
        assert sum(sizes) == sum(row.lengths) and max(sizes) <= 1.5 * tokens
        if len(sizes) > 1:
            assert len(row.sequences) == 1 and row.lengths[0] > 1.5 * tokens
            assert len(set(sizes[:-1])) == 1 and sizes[0] % 64 == 0 and sizes[-1] <= sizes[0]
    assert [row_cost(row, COSTS) for row in rows] == sorted(
        (row_cost(row, COSTS) for row in rows), reverse=True
    )


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=20))
def test_a_cut_does_all_of_the_work_and_no_more(lengths):
    whole = sum(COSTS.total([length]) for length in lengths)
    cost = sum(row_cost(row, COSTS) for row in cut(lengths, 1024, COSTS))
    assert cost == pytest.approx(whole)


def test_slices_have_equal_tokens_and_attend_to_what_is_before():
    (row,) = cut([10_000], 4096, COSTS)
    assert row.ends == (3392, 6784, 10_000)
    assert [unit.tokens for unit in row.units] == [3392, 3392, 3216]
    assert [unit.squares for unit in row.units] == [3392**2, 6784**2 - 3392**2, 10**8 - 6784**2]
    packed = Row((0, 1), (300, 200), (500,))
    assert packed.units[0].squares == 300**2 + 200**2


def test_slices_of_auto_give_six_units_for_each_rank():
    assert auto_tokens(10**6, 4) == 4096
    assert auto_tokens(6 * 4 * 3000, 4) == 3008
    assert auto_tokens(10**4, 4) == 2048 and auto_tokens(10**4, 4, least=512) == 512
    assert auto_tokens(10**6, 4, multiple=48) == 4224


@pytest.mark.parametrize("tokens", [0, 100, 1056])
def test_slices_that_are_no_multiple_are_refused(tokens):
    with pytest.raises(ConfigError, match=rf"slices of {tokens} tokens: .* multiple of 192"):
        cut([5000], tokens, COSTS, multiple=3)


def test_orders_of_rows_begin_with_the_longest():
    rows = cut([600, 9000, 5000, 700], 1024, COSTS)
    found = ordered(rows, 2, COSTS)
    assert next(iter(found)) == "longest first" and found["longest first"] == rows
    assert groups_of(found["ascending"]) == (1, 1, 5, 9) and len(found) == 5


def test_uncut_rows_take_the_time_of_microbatches():
    """So that a planner compares like with like."""
    rows = cut([500, 900, 700, 800], 640, COSTS)
    assert max(groups_of(rows)) == 1
    pipeline = SlicedPipeline(
        num_ranks=2, num_chunks=1, longest=900, costs=COSTS, schedule=ScheduleConfig(cap="1.5p")
    )
    work = sum(row_cost(row, COSTS) for row in rows)
    assert work < pipeline.run(rows).makespan < 1.6 * work


def test_a_slice_takes_of_the_head_what_its_tokens_are() -> None:
    """On the last stage alone. Its backward runs in F where rows are cut, else in B and W."""
    rows = cut([5000, 700], 1024, COSTS)
    head = (0.5, 0.25, 2.0)
    pipeline = SlicedPipeline(
        num_ranks=2, num_chunks=2, longest=5000, costs=COSTS, schedule=ScheduleConfig()
    )
    plain, headed = pipeline.run(rows), replace(pipeline, head=head).run(rows)
    assert headed.own[0] == plain.own[0]
    assert headed.own[1] == pytest.approx(plain.own[1] + 2.75 * 5700)
    took = {str(slot.action): slot.end - slot.start for slot in headed.slots[1]}
    for unit, piece in enumerate(piece for row in rows for piece in row.units):
        work = COSTS.of_work(Kind.F, piece.tokens, piece.squares) / 2
        assert took[f"0F{unit}"] == pytest.approx(work)
        assert took[f"1F{unit}"] == pytest.approx(work + 2.75 * piece.tokens)
        weight = COSTS.of_work(Kind.W, piece.tokens, piece.squares) / 2
        assert took[f"1W{unit}"] == pytest.approx(weight)
    whole = replace(pipeline, head=head).run(cut([700], 1024, COSTS))
    took = {str(slot.action): slot.end - slot.start for slot in whole.slots[1]}
    assert took["1F0"] == pytest.approx(COSTS.of_work(Kind.F, 700, 700**2) / 2 + 0.5 * 700)
    assert took["1W0"] == pytest.approx(COSTS.of_work(Kind.W, 700, 700**2) / 2 + 2.0 * 700)


def draw(mix, p, seed):
    """A batch: of fine-tuning, or a tenth of long sequences."""
    rng = random.Random(f"{mix} {seed}")
    if mix == "sft":
        return [sft(rng) for _ in range(64)]
    return [
        rng.randint(mix // 4, mix) if rng.random() < 0.1 else min(mix, sft(rng))
        for _ in range(64 if p == 8 else 32)
    ]


@pytest.mark.parametrize(
    ("mix", "p", "time"),
    [
        ("sft", 2, 1.022), (2**16, 2, 1.010), (2**17, 2, 1.005),
        pytest.param("sft", 4, 1.041, marks=pytest.mark.slow),
        pytest.param("sft", 8, 1.062, marks=pytest.mark.slow),
        pytest.param(2**14, 2, 1.023, marks=pytest.mark.slow),
        pytest.param(2**14, 4, 1.044, marks=pytest.mark.slow),
        pytest.param(2**16, 8, 1.021, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_time_of_slices_is_near_the_work_of_a_rank(mix, p, time):
    """Times of another simulator over other draws, at the static schedule's memory."""
    seeds = range(8 if p > 2 or mix == 2**14 else 4)
    comparison = Comparison(num_ranks=p, num_chunks=2, tokens=None)
    found = [comparison.figures(draw(mix, p, seed)) for seed in seeds]
    means = {name: statistics.fmean(one[name].time for one in found) for name in found[0]}
    assert means[SLICED] == pytest.approx(time, rel=0.01)
    assert means[SLICED] < means[STATIC] and means[SLICED] < means[STATIC_SLICED] + 0.005
    assert all(one[SLICED].peak <= 1.05 * one[STATIC].peak for one in found)


def test_the_command_compares_cut_and_uncut_batches(capsys):
    assert main(["--pp", "2", "--lengths", "9000,500,800,700", "--slices", "1024"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, 1 batch(es) of 4 sequences, slices of 1024 tokens" in out
    names = [line[:27].strip() for line in out.splitlines()[2:7]]
    assert names == [
        "static, packed", "dynamic, packed", "static, sliced", "dynamic, sliced",
        "dynamic, sliced, 0.6 memory",
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["--head", "--overhead", "--hop"])
def test_the_comparison_takes_times_of_the_head_of_tasks_and_of_messages(capsys, flag):
    """They were left out without a word."""

    def lines(*more):
        assert (
            main(["--pp", "2", "--lengths", "9000,5000,8000,700", "--slices", "1024", *more]) == 0
        )
        return capsys.readouterr().out

    assert lines() != lines(flag, "0.3") != lines(flag, "0.5")
    assert lines(flag, "0.5") == lines(flag, "0.5", "--no-grid")
    if flag == "--head":
        assert lines(flag, "0") == lines()


def test_times_of_a_comparison_are_in_forwards_of_the_mean_sequence() -> None:
    """Of a rank for the head, of one of its chunks for a task and a message; the time is over the
    work of the last rank."""
    one = Comparison(num_ranks=1, num_chunks=2, tokens=1024, overhead=0.0, head=0.5)
    assert one.figures([3000, 5000])[SLICED].time == pytest.approx(1.0)
    late = Comparison(num_ranks=1, num_chunks=2, tokens=None, overhead=0.2)
    found = late.figures([4000])[SLICED]
    assert found.num_units == 2
    waits = 3 * 2 - 1  # none follows the last task
    more = waits * 0.1 * COSTS.time(Kind.F, [4000]) / COSTS.total([4000])
    assert found.time == pytest.approx(1.0 + more)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--lengths", "sft", "--slices", "x"], "--slices x: expected a number of tokens, or auto"),
        (["--lengths", "sft", "--slices", "100"], "slices of 100 tokens: expected a multiple"),
        (["--slices", "auto"], "it needs --lengths"),
        (["--lengths", "0.5", "--slices", "auto"], "it needs --lengths"),
        (["--lengths", "sft", "--slices", "auto", "--compare"], "leave out --compare"),
        (["--lengths", "sft", "--slices", "auto", "--head", "-1"], "--head -1: must be a number"),
        (["--lengths", "sft", "--slices", "auto", "--hop", "nan"], "--hop nan: must be a number"),
        (["--lengths", "sft", "--slices", "auto", "--pp", "0"], "--pp 0: must be at least 1"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(capsys, flags, why):
    assert main(flags) == 2
    assert why in capsys.readouterr().err


def test_a_comparison_names_all_flags_that_it_does_not_read(capsys):
    """It read past most of them."""
    words = (
        "--lengths sft --slices auto --jitter 0 --slow-rank 1:2 --svg x --transient 2x:20% --grid "
        "--condition unif --cap auto --group 4 --w-pieces 1 --beta 0 --lead 0 --policy dynamic "
        "--split-backward on --slow-link 0-1:2 --longest 20000"
    )
    assert main(words.split()) == 2
    assert capsys.readouterr().err.endswith(
        "leave out --group, --grid, --svg, --policy, --cap, --split-backward, --w-pieces, --beta, "
        "--lead, --condition, --jitter, --longest, --slow-rank, --slow-link, --transient\n"
    )


def test_measured_costs_tell_the_smallest_slice_of_auto() -> None:
    """Its fixed time is 3 % of the cheapest task's."""
    assert tokens_for(10**4, 4, LengthCosts.transformer()) == 2048
    costs = LengthCosts(fixed=3.0, per_token=(0.2, 0.4, 0.1))
    assert costs.least_slice == 1000 and tokens_for(10**4, 4, costs) == 1024
    assert tokens_for(10**6, 4, costs) == 4096
    slow = LengthCosts(fixed=30.0, per_token=(0.2, 0.4, 0.0))
    assert slow.least_slice == 5000 and tokens_for(10**6, 4, slow) == 5056
    assert tokens_for(10**6, 4, slow, asked=256) == 256
