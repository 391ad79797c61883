"""The report's section on lengths, from made-up times with known costs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.report.analysis.work import JobShape, Work
from megatron.dpp.report.length_report import fit, gains, length_lines, length_report, samples_of
from megatron.dpp.report.pictures import tables
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.lengths import LengthCosts, sft
from megatron.dpp.trace.step_lengths import FILE, StepLengths, read_steps, write_step

COSTS = LengthCosts(fixed=1e-3, per_token=(2e-6, 3e-6, 2e-6), per_square=(1e-10, 2.5e-10, 0.0))
SHAPE = JobShape(2, 2, {0: 0, 1: 1}, {0: (0, 0), 1: (0, 0)}, "dpp")


def step(seed: int, count: int = 16) -> StepLengths:
    rng = random.Random(seed)
    microbatches = [[sft(rng)] for _ in range(count)]
    order = sorted(range(count), key=lambda i: microbatches[i])
    ran = [microbatches[i] for i in order]
    return StepLengths(ran, order, sum(map(sum, ran)) + 100)


def work(number: int, ran: StepLengths, *, split: bool = True) -> Work:
    """Every rank's chunks take half of a task each."""
    kinds = [Kind.F, Kind.B, Kind.W] if split else [Kind.F, Kind.B]
    tasks = {
        (rank, chunk): {
            kind.name: {
                place: round(COSTS.time(kind, lengths) / 2 * 1e9)
                for place, lengths in enumerate(ran.microbatches)
            }
            for kind in kinds
        }
        for rank in (0, 1)
        for chunk in (0, 1)
    }
    return Work(number, tasks)


def test_costs_are_found_again() -> None:
    steps = {n: step(n) for n in range(3)}
    found = fit(samples_of([work(n, each) for n, each in steps.items()], SHAPE, steps))
    assert found is not None
    for lengths in ([100], [4000], [300, 7000]):
        for kind in Kind:
            assert found.time(kind, lengths) == pytest.approx(COSTS.time(kind, lengths), rel=0.01)
    assert fit(samples_of([work(0, step(0, 4))], SHAPE, {0: step(0, 4)})) is None


def test_a_fused_backward_is_taken_apart() -> None:
    steps = {0: step(0)}
    found = fit(samples_of([work(0, steps[0], split=False)], SHAPE, steps))
    assert found is not None and found.per_token[Kind.W] > 0
    both = found.per_token[Kind.B] + found.per_token[Kind.W]
    assert both == pytest.approx(COSTS.per_token[Kind.B], rel=0.01)


def test_the_section_has_classes_padding_and_gains(tmp_path: Path) -> None:
    for number in (1, 2):
        write_step(tmp_path / FILE.format(0), number, step(number))
    assert read_steps(tmp_path) == {1: step(1), 2: step(2)}
    works = [work(number, step(number)) for number in (1, 2)]
    section = length_report(works, SHAPE, tmp_path, 2)
    assert section is not None
    assert 0 < section.padding < 0.05
    assert sum(row.microbatches for row in section.size_classes) == 32
    times = {(row.schedule, row.plan): row.seconds for row in section.gains}
    assert times["dynamic", "drawn"] < times["static", "drawn"]
    own = sum(COSTS.total(lengths) for lengths in step(2).microbatches)
    assert own < times["dynamic", "drawn"] < 1.5 * own  # seconds of a rank's own work
    assert min(s for (name, _), s in times.items() if name == "static") < times["static", "drawn"]
    text = "\n".join(length_lines(section))
    assert "dynamic" in text and "padding" in text
    (ran,) = (row for row in section.gains if row.ran)
    assert (ran.schedule, ran.plan, ran.saves) == ("dynamic", "as it ran", 0)
    best = min(section.gains, key=lambda row: row.seconds)
    assert "The dynamic schedule in the order that ran takes" in text
    assert "policy auto, the default cap" in text
    assert f"{best.plan}, would save {best.saves:.1%}" in text


@pytest.mark.parametrize(("asked", "found"), [(1, 1), (2, 2), (7, 2)])
def test_the_plans_are_those_of_the_step_asked_for_or_the_last(
    asked: int, found: int, tmp_path: Path
) -> None:
    steps = {number: step(number, 6) for number in (1, 2)}
    for number, each in steps.items():
        write_step(tmp_path / FILE.format(0), number, each)
    works = [work(number, each) for number, each in steps.items()]
    section = length_report(works, SHAPE, tmp_path, asked)
    assert section is not None and section.iteration == found
    assert section.gains == gains(steps[found], LengthCosts(**section.costs), SHAPE)


def test_the_row_that_ran_is_marked_whatever_ran() -> None:
    drawn = step(3)
    drawn = StepLengths(drawn.as_drawn(), list(range(16)), drawn.padded)
    static = JobShape(2, 2, {0: 0, 1: 1}, {0: (0, 0), 1: (0, 0)}, "pp")
    (ran,) = (row for row in gains(drawn, COSTS, static) if row.ran)
    assert (ran.schedule, ran.plan, ran.gain) == ("static", "drawn", 1)
    packed = StepLengths([[900, 200], [3000], [40, 50, 60], [800]], [0, 1, 2, 3], 5050)
    plans = {row.plan.split(", ")[0] for row in gains(packed, COSTS, SHAPE)}
    assert "one per microbatch" in plans


def test_the_page_shows_the_section(tmp_path: Path) -> None:
    write_step(tmp_path / FILE.format(0), 1, step(1))
    section = length_report([work(1, step(1))], SHAPE, tmp_path, 1)
    assert section is not None
    text = tables.lengths(section, "<svg>")
    assert section.sentence in text and "as it ran (ran)" in text
    assert text.count("<tr>") == 2 + len(section.gains) + len(section.size_classes)
    assert text.count("<svg") == 1 and "\N{MICRO SIGN}s per token" in text


def test_a_run_without_lengths_has_no_section(tmp_path: Path) -> None:
    assert length_report([work(0, step(0))], SHAPE, tmp_path, 0) is None
    (tmp_path / FILE.format(0)).write_text("{}\n")
    with pytest.raises(DataError, match="line 1"):
        read_steps(tmp_path)
