"""The report in sentences, and numbers as text."""

from __future__ import annotations

from megatron.dpp.config import GRAPHS_PAY_FROM
from megatron.dpp.report.analysis.model import JobShape
from megatron.dpp.report.analysis.stragglers import Culprit
from megatron.dpp.report.analysis.summary import Analysis, RunTotals
from megatron.dpp.report.run_files import Training
from megatron.dpp.trace.schema import IdleCause

LEAST = 0.01
"""A cause that costs a smaller share of an iteration is none."""

HOW_TO_TRACE = (
    "No trace: train with --dpp-trace, or with TRACE=1 in a launch script, for the timeline of the "
    "ranks and the causes of idle time."
)

DYNAMIC, STATIC = "dynamic schedule", "Megatron's static order"
"""Names of the what-ifs with another schedule."""

EVEN_LAYERS = "layers laid out evenly"
"""Name of the what-if that moves layers until every stage has the same work."""

EVEN_EXPERTS = "as many tokens on all ranks of an expert-parallel group"
"""Name of the what-if without imbalance of experts."""

NOT_OF_SLICES = (
    "sequences ran in slices, and what a change of such a run would gain is not simulated"
)

_KINDS = {
    "slow-rank": "{name} computes {factor:.2f} times slower than its peers",
    "heavy-stage": "{name} has {factor:.2f} times the work of the others",
    "slow-link": "messages between {name} take {factor:.1f} times as long as they should",
    "transient": "{name} is slow now and then (slowest tenth: {factor:.2f} times its usual)",
    "jitter": "task times vary on {name} (slowest tenth: {factor:.2f} times the usual)",
}


def duration(ms: float) -> str:
    """A time with up to four digits: ``13.05 s``, ``930.7 ms``, ``4.215 ms``, ``31.2 us``."""
    if abs(ms) >= 999.95:
        return f"{ms / 1e3:.4g} s"
    return f"{ms:.4g} ms" if abs(ms) >= 0.1 or not ms else f"{ms * 1e3:.4g} us"


def percent(share: float) -> str:
    """A share: ``12.3 %``."""
    return f"{share * 100:.1f} %"


def number(value: float) -> str:
    """A plain number, as short as its size allows: ``4,218``, ``62.1``, ``4.83``, ``0.0213``."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def time_left(seconds: float) -> str:
    """A time to wait for: ``45 s``, ``12 min``, ``3 h 05 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def straggler_text(culprit: Culprit, shape: JobShape) -> str:
    """One finding as a sentence."""
    text = _KINDS[culprit.kind].format(name=culprit.where(shape), factor=culprit.factor)
    often = f"in {culprit.share * 100:.0f} % of the iterations, since iteration {culprit.since}"
    text += f", {'in every iteration' if culprit.share >= 1 else often}"
    if culprit.victims:
        text += f"; waiting most meanwhile: {', '.join(map(shape.name_of, culprit.victims))}"
    moved = "; another layout of the layers takes work from it"
    return text + (moved if culprit.kind == "heavy-stage" else "")


def _race_lines(found: Analysis) -> list[str]:
    """The race that decided which schedule runs."""
    peaks = {name: value for row in found.ranks for name, value in row.peaks.items()}
    ways = [name.removeprefix("race: ") for name in peaks if name.startswith("race: ")]
    if not ways:
        return []
    times = ", ".join(f"{way} {duration(peaks[f'race: {way}'])}" for way in ways)
    winners = " and later ".join(way for way in ways if peaks.get(f"runs: {way}"))
    return [f"Raced: {times}. {winners[:1].upper()}{winners[1:]} ran."]


def training_sentences(training: Training) -> list[str]:
    """Progress and loss of a run; empty without metrics."""
    if not training.metrics:
        return []
    left, speed = training.seconds_left, training.median("tokens/s")
    total = f" of {training.total}" if training.total else ""
    parts = [f"Iteration {training.iteration}{total}", training.state]
    parts += [f"about {time_left(left)} left"] if left else []
    parts += [f"{number(speed)} tokens/s in the median"] if speed else []
    parts += [f"checkpoint {training.checkpoint}"] if training.checkpoint is not None else []
    lines = [", ".join(parts) + "."]
    x, y = training.series("loss")
    if y:
        lines.append(f"Loss {y[0]:.4g} at iteration {x[0]}, {y[-1]:.4g} at {x[-1]}.")
    if training.evaluations:
        at, loss = training.evaluations[-1]
        lines.append(f"Validation loss {number(loss)} at iteration {at}.")
    return lines


def sentences(found: Analysis) -> list[str]:
    """The summary of a traced run, most important first."""
    lines = time_sentences(found.totals) + _other_order_lines(found) + _expert_lines(found)
    lines += _race_lines(found)
    launching = max((row.peaks.get("launching", 0.0) for row in found.ranks), default=0.0)
    if launching >= GRAPHS_PAY_FROM:
        lines.append(
            f"Launching takes up to {percent(launching)} of the tasks' time: CUDA graphs or a "
            "larger micro-batch shorten a step."
        )
    lines += [f"{NOT_OF_SLICES[0].upper()}{NOT_OF_SLICES[1:]}."] if found.sliced else []
    lines += [f"{finding.text[0].upper()}{finding.text[1:]}." for finding in found.stragglers]
    lines += [] if found.stragglers else ["No straggler."]
    lines += [
        f"Without effect on the time of an iteration: {finding.text}."
        for finding in found.without_effect
    ]
    lines += _gain_lines(found)
    if short := found.cut_short:
        lines.append(f"The traces of {len(short)} ranks have no end: killed, or still running.")
    return lines


def time_sentences(totals: RunTotals) -> list[str]:
    meanings = {str(cause): cause.meaning for cause in IdleCause}
    causes = ", ".join(
        f"{percent(share)} {meanings.get(cause, cause)}"
        for cause, share in totals.bubble_by_cause.items()
        if share >= 0.001
    )
    return [
        f"An iteration takes {duration(totals.mean_ms)} on average (median "
        f"{duration(totals.iteration_ms)}): {duration(totals.window_ms)} for the pipeline, "
        f"{duration(totals.tail_ms)} for gradient reduction, optimizer and the like.",
        f"The busiest rank needs {duration(totals.ideal_ms)} for its own tasks, so the pipeline "
        f"takes {totals.ideal_ratio:.3f} times the least possible.",
        f"On average {percent(totals.bubble)} of the pipeline's time is idle: {causes}.",
    ]


def _other_order_lines(found: Analysis) -> list[str]:
    """The schedule that ran against the other one, with the same tasks."""
    other = DYNAMIC if found.name == "static" else STATIC
    gain = next((row.gain for row in found.what_if if row.name == other), None)
    if gain is None:
        return []
    name = other if other == STATIC else f"the {other}"
    if abs(gain) < LEAST:
        return [f"Replayed, {name} takes as long as what ran, within {LEAST:.0%}."]
    than = f"{percent(abs(gain))} {'less' if gain > 0 else 'more'} time per iteration"
    verdict = f" {found.name.capitalize()} loses here." if gain > 0 else ""
    return [f"Replayed, {name} takes {than} than what ran.{verdict}"]


def _expert_lines(found: Analysis) -> list[str]:
    """The imbalance of experts, and its cost beside the pipeline's."""
    rows, totals = found.experts, found.totals
    if not rows:
        return []
    worst = max(rows, key=lambda row: row.imbalance)
    first = (
        f"Experts: the fullest one of layer {worst.layer} gets {worst.imbalance:.2f} times "
        f"the mean number of tokens, the most of {len(rows)} layers."
    )
    if worst.group_size == 1:
        return [f"{first} No rank waits for another's experts: each has all of its layers."]
    cost = max((row.gain for row in found.what_if if row.name == EVEN_EXPERTS), default=0.0)
    if cost < LEAST:
        return [f"{first} That costs less than {LEAST:.0%} of an iteration."]
    pipeline = (totals.window_ms - totals.ideal_ms) / totals.mean_ms
    slowest = max(rows, key=lambda row: row.lost_ms)
    more = "The imbalance of experts, and not the pipeline, costs most: it takes"
    return [
        first,
        f"{more if cost > pipeline else 'The imbalance of experts takes'} about {cost:.1%} of an "
        f"iteration: in layer {slowest.layer} the fullest rank has "
        f"{slowest.rank_imbalance:.2f} times the mean rank's tokens, and the others wait for it "
        f"inside of their tasks. The pipeline costs {pipeline:.1%} beyond the busiest rank's "
        "tasks.",
    ]


def _gain_lines(found: Analysis) -> list[str]:
    """The best change. A heavy stage's work cannot vanish; moved, it gains less."""
    best = max(found.what_if, key=lambda row: row.gain, default=None)
    if best is None or best.gain <= LEAST:
        return []
    moved = [row.gain for row in found.what_if if row.name == EVEN_LAYERS]
    after = ""
    if best.name.startswith("without heavy-stage") and moved:
        after = f" if that work were gone; laid out evenly over all stages {percent(moved[0])}"
    gain = f"{percent(best.gain)} of an iteration{after}"
    return [f"The largest predicted gain: {best.name}, {gain}."]
