"""The report in sentences."""

from __future__ import annotations

from megatron.dpp.config import GRAPHS_PAY_FROM
from megatron.dpp.report.analysis.formats import duration, number, percent, time_left
from megatron.dpp.report.analysis.report_data import (
    Difference,
    Pipeline,
    Prediction,
    Totals,
    Training,
)
from megatron.dpp.report.analysis.stragglers import Culprit
from megatron.dpp.report.analysis.work import JobShape
from megatron.dpp.trace.vocabulary import words_of

LEAST = 0.01
"""A cause that costs a smaller share of an iteration is none."""

HOW_TO_TRACE = (
    "No trace: train with --dpp-trace, or with TRACE=1 in a launch script, for the timeline of the "
    "ranks and the causes of idle time."
)

_EVEN = 0.01
"""Change of the pipeline's time that a simulation does not tell from none."""

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


_REMEDIES = {"heavy-stage": "; another layout of the layers takes work from it"}


def straggler_text(culprit: Culprit, shape: JobShape) -> str:
    """One finding as a sentence."""
    text = _KINDS[culprit.kind].format(name=culprit.where(shape), factor=culprit.factor)
    often = f"in {culprit.share * 100:.0f} % of the iterations, since iteration {culprit.since}"
    if culprit.share >= 1:
        often = "in every iteration"
    victims = ", ".join(map(shape.name_of, culprit.victims))
    text = f"{text}, {often}" + (f"; waiting most meanwhile: {victims}" if victims else "")
    return text + _REMEDIES.get(culprit.kind, "")


def _with_all_its_work(best: Prediction, what_if: list[Prediction]) -> str:
    """A heavy stage's work cannot vanish, it can be moved: what that gains."""
    moved = [row.gain for row in what_if if row.name == EVEN_LAYERS]
    if not best.name.startswith("without heavy-stage") or not moved:
        return ""
    return f" if that work were gone; laid out evenly over all stages {percent(moved[0])}"


def _expert_lines(found: Pipeline) -> list[str]:
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
    text = (
        f"{{}} about {cost:.1%} of an iteration: in layer {slowest.layer} the fullest rank has "
        f"{slowest.rank_imbalance:.2f} times the mean rank's tokens, and the others wait for it "
        f"inside of their tasks. The pipeline costs {pipeline:.1%} beyond the busiest rank's tasks."
    )
    more = "The imbalance of experts, and not the pipeline, costs most: it takes"
    return [first, text.format(more if cost > pipeline else "The imbalance of experts takes")]


def _time_lines(totals: Totals) -> list[str]:
    causes = ", ".join(
        f"{percent(share)} {words_of(cause)}"
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


def _other_order_lines(found: Pipeline) -> list[str]:
    """The schedule that ran against the other one, with the same tasks."""
    other = found.other_order
    if other is None:
        return []
    name = {"static": "Megatron's static order", "dynamic": "the dynamic schedule"}[other.schedule]
    change = other.stretched - 1
    if abs(change) < _EVEN:
        return [f"Replayed, {name} takes as long as what ran, within {_EVEN:.0%}."]
    than = f"{percent(abs(change))} {'longer' if change > 0 else 'less'}"
    verdict = "" if change > 0 else f" {found.name.capitalize()} loses here."
    return [f"Replayed, {name} takes {than} than what ran for the same tasks.{verdict}"]


def _host_lines(found: Pipeline) -> list[str]:
    """Names the ways of a step that were raced, and the remedy where launching limits a run."""
    peaks = {name: value for row in found.ranks for name, value in row.peaks.items()}
    ways = [name[6:] for name in peaks if name.startswith("race: ")]
    times = ", ".join(f"{way} {duration(peaks[f'race: {way}'])}" for way in ways)
    ran = " and ".join(way for way in ways if f"runs: {way}" in peaks)
    lines = [f"Raced: {times}. {ran[:1].upper()}{ran[1:]} ran."] if ways else []
    launching = max((row.peaks.get("launching", 0.0) for row in found.ranks), default=0.0)
    if launching >= GRAPHS_PAY_FROM:
        share = f"Launching takes up to {percent(launching)} of the tasks' time"
        lines.append(f"{share}: CUDA graphs or a larger micro-batch shorten a step.")
    return lines


def training_sentences(training: Training) -> list[str]:
    """Progress and loss of a run; empty without metrics."""
    if not training.metrics:
        return []
    left, speed = training.seconds_left, training.median("tokens/s")
    parts = [training.progress[0].upper() + training.progress[1:], training.state]
    parts += [f"about {time_left(left)} left"] if left else []
    parts += [f"{number(speed)} tokens/s in the median"] if speed else []
    lines = [", ".join(parts) + "."]
    x, y = training.series("loss")
    if y:
        lines.append(f"Loss {number(y[0])} at iteration {x[0]}, {number(y[-1])} at {x[-1]}.")
    if training.evaluations:
        at, loss = training.evaluations[-1]
        lines.append(f"Validation loss {number(loss)} at iteration {at}.")
    return lines


def difference_sentences(found: Difference) -> list[str]:
    """Names the metrics that two runs share bit by bit, and how far the others differ."""
    if not found.common:
        return ["The two runs have no step in common."]
    lines = []
    if found.equal:
        names = ", ".join(found.equal)
        lines.append(f"Equal bit by bit in all {found.common} common steps: {names}.")
    if found.largest:
        each = ", ".join(f"{name} by at most {size:.3g}" for name, size in found.largest.items())
        lines.append(f"Different in the {found.common} common steps: {each}.")
    return lines


def sentences(found: Pipeline) -> list[str]:
    """The summary, most important first."""
    lines = _time_lines(found.totals) + _other_order_lines(found) + _expert_lines(found)
    lines += _host_lines(found)
    lines += [f"{NOT_OF_SLICES[0].upper()}{NOT_OF_SLICES[1:]}."] if found.run.sliced else []
    lines += [f"{each.text[0].upper()}{each.text[1:]}." for each in found.stragglers]
    if not found.stragglers:
        lines.append("No straggler.")
    lines += [
        f"Without effect on the time of an iteration: {each.text}." for each in found.without_effect
    ]
    best = max(found.what_if, key=lambda row: row.gain, default=None)
    if best is not None and best.gain > 0.01:
        lines.append(
            f"The largest predicted gain: {best.name}, {percent(best.gain)} of an iteration"
            f"{_with_all_its_work(best, found.what_if)}."
        )
    if found.run.cut_short:
        lines.append(
            f"The traces of {len(found.run.cut_short)} ranks have no end: killed, or still running."
        )
    return lines
