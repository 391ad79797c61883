"""The report's section on sequences of unlike length: time per token, padding, and what orders,
packing and the dynamic schedule gain.

``train --trace`` writes the lengths of each replica's microbatches beside the trace. A task's time
is fitted to ``a + b * tokens + c * sum(length ** 2)``, and other plans are simulated with that.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.analysis.report_data import Lengths, PlanRow, SizeClass
from megatron.dpp.report.analysis.work import JobShape, Work
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.batches import BatchSettings, share_batch
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.orders import plan_order
from megatron.dpp.sim.pipeline_model import PipelineModel
from megatron.dpp.trace.step_lengths import StepLengths, read_steps

_NAMES = {"F": Kind.F, "B": Kind.B, "W": Kind.W}
_LEAST_SAMPLES = 6
"""Microbatches of unlike size that a fit needs."""


@dataclass(frozen=True)
class Sample:
    """Time of one kind of task of a rank's all chunks for one microbatch, in seconds."""

    kind: Kind
    lengths: tuple[int, ...]
    seconds: float


def samples_of(
    works: Iterable[Work], shape: JobShape, steps: Mapping[int, StepLengths]
) -> list[Sample]:
    """Times of the first pipeline's tasks, the mean over its ranks."""
    ranks = shape.pipelines()[0]
    found = []
    for work in works:
        step = steps.get(work.number)
        for name, kind in _NAMES.items() if step else ():
            for place, lengths in enumerate(step.microbatches if step else ()):
                cells = [(rank, chunk) for rank in ranks for chunk in range(shape.num_chunks)]
                times = [work.tasks.get(c, {}).get(name, {}).get(place, 0) for c in cells]
                if any(times):
                    mean = sum(times) / len(ranks) / 1e9
                    found.append(Sample(kind, tuple(lengths), mean))
    return found


def fit(samples: Sequence[Sample]) -> LengthCosts | None:
    """Costs by least squares, none of them negative; None for too few unlike lengths.

    A fused backward has no samples of its own for W: W then takes a forward's time.
    """
    import numpy

    if len({sum(sample.lengths) for sample in samples}) < _LEAST_SAMPLES:
        return None
    rows = numpy.zeros((len(samples), 7))
    for row, sample in zip(rows, samples, strict=True):
        row[0] = 1.0
        row[1 + sample.kind] = sum(sample.lengths)
        row[4 + sample.kind] = sum(length**2 for length in sample.lengths)
    seconds = numpy.array([sample.seconds for sample in samples])
    free = [column for column in range(7) if rows[:, column].any()]
    found = numpy.zeros(7)
    while free:  # drop what would be negative, the most first
        scale = rows[:, free].max(axis=0)
        values = numpy.linalg.lstsq(rows[:, free] / scale, seconds, rcond=None)[0] / scale
        worst = int((values * scale).argmin())
        if values[worst] >= 0:
            found[free] = values
            break
        del free[worst]
    a, *rest = (float(value) for value in found)
    tokens, squares = rest[:3], rest[3:]
    if all(sample.kind is not Kind.W for sample in samples):
        tokens[Kind.W] = min(tokens[Kind.F], tokens[Kind.B])
        tokens[Kind.B] -= tokens[Kind.W]
    return LengthCosts(
        fixed=a,
        per_token=(tokens[0], tokens[1], tokens[2]),
        per_square=(squares[0], squares[1], squares[2]),
    )


def size_classes(samples: Sequence[Sample]) -> list[SizeClass]:
    """A row per power of two of a microbatch's tokens."""
    classes: dict[int, list[Sample]] = {}
    for sample in samples:
        classes.setdefault((sum(sample.lengths) - 1).bit_length(), []).append(sample)
    rows = []
    for power, found in sorted(classes.items()):
        times: dict[str, float | None] = {}
        for name, kind in _NAMES.items():
            own = [sample for sample in found if sample.kind is kind]
            tokens = sum(sum(sample.lengths) for sample in own)
            times[name] = sum(sample.seconds for sample in own) / tokens * 1e6 if own else None
        count = sum(sample.kind is Kind.F for sample in found)
        mean = statistics.fmean(sum(sample.lengths) for sample in found)
        rows.append(SizeClass(1 << power, count, mean, **times))
    return rows


def gains(step: StepLengths, costs: LengthCosts, shape: JobShape) -> list[PlanRow]:
    """Simulated seconds of a step under each schedule: in the drawn order, in the best of the named
    orders, packed evenly, and with one sequence per microbatch. A dynamic schedule is simulated
    with policy ``auto``, the default cap and split backwards, whatever the run had.
    """
    drawn = step.as_drawn()
    own = "dynamic" if shape.schedule == "dpp" else "static"
    times: dict[tuple[str, str], float] = {}
    ran = own, "as it ran"
    for schedule, policy in (("static", None), ("dynamic", "auto")):
        model = PipelineModel(
            num_ranks=shape.num_ranks,
            num_chunks=shape.num_chunks,
            longest=max(sum(lengths) for lengths in drawn),
            policy=policy,
            costs=costs,
        )
        times[schedule, "drawn"] = model.seconds(drawn)
        for name, microbatches in _shared(drawn, model):
            found = plan_order(model, microbatches)
            ordered = [microbatches[i] for i in found.order]
            seconds = model.seconds(ordered, found.policy)
            times.setdefault((schedule, f"{name}{found.name}"), seconds)
        if schedule == own and step.microbatches != drawn:
            times[ran] = model.seconds(step.microbatches)
    if ran not in times:  # it has a row already
        ran = own, "drawn"
    first, now = next(iter(times.values())), times[ran]
    return [
        PlanRow(*key, seconds, ran=key == ran, saves=1 - seconds / now, gain=first / seconds)
        for key, seconds in times.items()
    ]


def _shared(drawn: list[list[int]], model: PipelineModel) -> Iterator[tuple[str, list[list[int]]]]:
    """The sequences shared out to microbatches in several ways, each with a prefix for its name."""
    yield "", drawn
    yield "packed, ", _packed(drawn, model)
    alone = [[length] for lengths in drawn for length in lengths]
    whole = model.policy or model.num_chunks == 1 or len(alone) % model.num_ranks == 0
    if len(alone) > len(drawn) and whole:
        yield "one per microbatch, ", alone


def _packed(microbatches: Sequence[Sequence[int]], model: PipelineModel) -> list[list[int]]:
    """The sequences packed evenly into microbatches; as they are where that cannot be."""
    lengths = [length for each in microbatches for length in each]
    chunks = model.num_chunks > 1 and model.policy is None
    settings = BatchSettings(
        num_ranks=model.num_ranks,
        packing="even",
        budget=model.longest,
        costs=model.costs,
        multiple=model.num_ranks if chunks else 1,
    )
    try:
        return [[lengths[i] for i in each] for each in share_batch(lengths, settings)[0]]
    except ConfigError:
        return [list(each) for each in microbatches]


def length_report(
    works: Sequence[Work], shape: JobShape, folder: Path, number: int
) -> Lengths | None:
    """The section's numbers, None for a run that wrote no lengths.

    Args:
        number: the iteration whose plans are simulated.
    """
    steps = read_steps(folder)
    found = [(work.number, steps[work.number]) for work in works if work.number in steps]
    if not found:
        return None
    real = sum(sum(map(sum, step.microbatches)) for _, step in found)
    samples = samples_of(works, shape, steps)
    costs = fit(samples)
    number = number if number in steps else found[-1][0]
    rows = gains(steps[number], costs, shape) if costs and shape.num_ranks > 1 else []
    tokens, padded = real / len(found), sum(step.padded for _, step in found)
    padding = 1.0 - real / max(padded, 1)
    longest = max(itertools.chain(*itertools.chain(*(s.microbatches for _, s in found))))
    return Lengths(
        iteration=number,
        tokens_per_step=tokens,
        padding=padding,
        longest=longest,
        costs=None if costs is None else dict(vars(costs)),
        size_classes=size_classes(samples),
        gains=rows,
        sentence=(
            f"Sequences: {tokens:,.0f} tokens a step on the first replica, {padding:.1%} of what "
            f"ran was padding; the longest has {longest:,}."
        ),
        gains_sentence=_gains_sentence(rows) if rows else "",
    )


def length_lines(section: Lengths) -> list[str]:
    """The section as text."""
    lines = [
        section.sentence,
        f"  {'up to':>8s}{'microbatches':>14s}{'mean tokens':>13s}  us per token: F, B, W",
    ]
    for size in section.size_classes:
        times = ", ".join("-" if t is None else f"{t:.3g}" for t in (size.F, size.B, size.W))
        lines.append(f"  {size.up_to:8d}{size.microbatches:14d}{size.tokens:13.0f}  {times}")
    if section.gains:
        lines.append(section.gains_sentence)
        lines.append("  simulated: schedule, order, ms, gain over the first, saved of what ran")
        lines.append("  (dynamic has policy auto, the default cap and split backwards throughout)")
    for row in section.gains:
        lines.append(
            f"  {row.schedule:10s}{row.plan:42s}{row.seconds * 1e3:10.1f}"
            f"{row.gain:8.2f}{row.saves:+8.1%}{'  (ran)' if row.ran else ''}"
        )
    return lines


def _gains_sentence(rows: Sequence[PlanRow]) -> str:
    """The gain of the run's schedule and order over the static schedule as drawn, and that of the
    best row; by the simulator.
    """
    ran = next(row for row in rows if row.ran)
    best = min(rows, key=lambda row: row.seconds)
    change = _against(1 / ran.gain - 1)
    did = (
        f"The {ran.schedule} schedule in the order that ran takes {change} the static schedule "
        "in the drawn order"
    )
    if ran is rows[0]:
        did = "The run had the static schedule in the drawn order"
    if best.saves < 0.005:
        return f"{did}; no other row takes 0.5 % less."
    return f"{did}; {best.schedule}, {best.plan}, would save {best.saves:.1%} of that."


def _against(change: float) -> str:
    if abs(change) < 0.0005:
        return "as long as"
    return f"{abs(change):.1%} {'more' if change > 0 else 'less'} time than"
