"""``megatron-dpp report``: where the time of a traced run went, who was slow, what a change gains.

    megatron-dpp report --benchmark_dir benchmark/data-1-pipeline-4-tensor-1-dpp

Writes ``report.html`` (one file, no network needed) into that directory and prints the summary.
``--baseline`` sets another run beside it, such as the static schedule's.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import ROOT, guarded, new_parser, progress_bar
from megatron.dpp.errors import DataError, require
from megatron.dpp.report.align import Alignment, align
from megatron.dpp.report.analysis.experts import lost_per_forward
from megatron.dpp.report.analysis.limits import Limit
from megatron.dpp.report.analysis.model import read_iterations
from megatron.dpp.report.analysis.sentences import EVEN_EXPERTS, LEAST, sentences, straggler_text
from megatron.dpp.report.analysis.summary import Analysis, analyse, summary
from megatron.dpp.report.analysis.timeline import timeline
from megatron.dpp.report.length_report import length_lines, length_report
from megatron.dpp.report.pictures.charts import write_plots
from megatron.dpp.report.pictures.page import page
from megatron.dpp.report.reader import TraceFile, find_directory, open_run
from megatron.dpp.report.recorded import Recorded, cost_file, recorded_runs
from megatron.dpp.report.run_files import run_facts
from megatron.dpp.report.whatif import WhatIf, effects, predict_all, without_imbalance
from megatron.dpp.safe_files import open_text_to_write


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options that choose what of which run is analysed; ``plots`` takes them too."""
    add = parser.add_argument
    add("--benchmark_dir", "--benchmark-dir", default="runs/latest", metavar="DIR",
        help="home or traces of a run (default: runs/latest)")  # fmt: skip
    add("--baseline", metavar="DIR", help="another run beside it, such as the static schedule")
    add("--skip", type=int, metavar="N", help="leave out N leading iterations (default: 1 of >= 3)")
    add("--iteration", type=int, metavar="N", help="timeline of iteration N (default: the median)")
    add("--metrics-file", metavar="FILE", help="loss and tokens/s (default: of the run's home)")
    add("--threshold", type=float, default=1.15, metavar="X", help="X times slower is a straggler")


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Say where the time of a traced run went, who was slow, and what a change would gain."
    parser = new_parser(prog, text)
    add_run_options(parser)
    add = parser.add_argument
    add("--output", metavar="FILE", help="the HTML (default: report.html in the run's directory)")
    add("--plots", metavar="DIR", help="also write pictures there (needs matplotlib)")
    add("--json", action="store_true", help="print the numbers as JSON instead of sentences")
    add("--costs", metavar="FILE", help="also write the recorded costs, for megatron-dpp sim")
    add("--length-costs", metavar="FILE",
        help="also write times over sequence lengths, for train --length-costs")  # fmt: skip
    add("--fail-if", action="append", default=[], metavar="LIMIT",
        help="exit with 2 when a total breaks it: 'bubble>0.25'; may be repeated")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp report") -> int:
    """Exit status: 0, 2 when a ``--fail-if`` limit is broken, 1 after an error."""
    options = _parser(prog).parse_args(argv)
    return guarded(prog, lambda: _run(options, prog))


def _load(
    name: str, skip: int | None, threshold: float, *, quiet: bool
) -> tuple[list[TraceFile], Alignment, Analysis]:
    files = open_run(find_directory(name, ROOT))
    settings = {"disable": True} if quiet else {}
    with progress_bar(sum(file.size for file in files), **settings) as bar:
        alignment = align(files, lambda file: bar.update(file.size))
    analysis = analyse(files, alignment, skip=skip, threshold=threshold)
    return files, alignment, analysis


def _what_if(analysis: Analysis, runs: list[Recorded]) -> dict[str, Any]:
    if not runs:
        return {"what_if": [], "fidelity": 0.0, "effects": [None] * len(analysis.culprits)}
    ranks = analysis.shape.pipelines()[0]
    what_if = WhatIf(runs)
    predictions = predict_all(what_if, analysis.culprits, ranks)
    lost = lost_per_forward(analysis.loads)
    if any(lost.values()):
        change = without_imbalance(ranks, lost)
        predictions.append(what_if.in_recorded_order(EVEN_EXPERTS, change))
    rows = [
        {"name": p.name, "now_ms": p.now * 1e3, "then_ms": p.then * 1e3, "gain": p.gain}
        for p in sorted(predictions, key=lambda p: -p.gain)
    ]
    costs = effects(what_if, analysis.culprits, ranks)
    return {"what_if": rows, "fidelity": what_if.fidelity, "effects": costs}


def _set_aside_harmless(report: dict[str, Any]) -> None:
    """A cause that costs next to nothing is no straggler, however slow it is."""
    for straggler, effect in zip(report["stragglers"], report.pop("effects"), strict=True):
        straggler["text"], straggler["effect"] = straggler_text(straggler), effect
    harmless = [s for s in report["stragglers"] if s["effect"] is not None and s["effect"] < LEAST]
    report["stragglers"] = [s for s in report["stragglers"] if s not in harmless]
    report["without_effect"] = harmless
    report["totals"]["stragglers"] = len(report["stragglers"])


def build_report(
    options: argparse.Namespace, *, quiet: bool = False
) -> tuple[dict[str, Any], list[Recorded]]:
    """All numbers, sentences and the timeline of a run, for pictures and page; ``quiet`` without a
    progress bar.

    Raises:
        DppError: an option that cannot be, or a run that cannot be read.
    """
    require(options.threshold > 1, f"--threshold {options.threshold:g}: must be above 1")
    require((options.skip or 0) >= 0, f"--skip {options.skip}: must be at least 0")
    load = functools.partial(_load, skip=options.skip, threshold=options.threshold, quiet=quiet)
    files, alignment, analysis = load(options.benchmark_dir)
    runs = recorded_runs(analysis)
    report = summary(analysis) | _what_if(analysis, runs)
    number = analysis.typical().number if options.iteration is None else options.iteration
    shown = next(read_iterations(files, alignment, {number}), None)
    require(shown is not None, f"--iteration {number}: not recorded by every rank")
    assert shown is not None
    order = [rank for ranks in analysis.shape.pipelines() for rank in ranks]
    report["timeline"] = timeline(shown, order)
    _set_aside_harmless(report)
    report["sentences"] = sentences(report)
    folder = files[0].path.parent
    report["lengths"] = length_report(analysis.works, analysis.shape, folder, number)
    report |= run_facts(folder, options.metrics_file)
    if options.baseline:
        other, _, beside = load(options.baseline)
        report["baseline"] = summary(beside) | run_facts(other[0].path.parent)
    return report, runs


def _numbers(report: dict[str, Any]) -> dict[str, Any]:
    """The report without its series, for JSON."""
    hidden = ("timeline", "metrics")
    numbers = {name: value for name, value in report.items() if name not in hidden}
    if "baseline" in numbers:
        numbers["baseline"] = _numbers(numbers["baseline"])
    return numbers


def _write(path: Path, text: str) -> None:
    with open_text_to_write(path) as file:
        file.write(text)


def _run(options: argparse.Namespace, prog: str) -> int:
    limits = [Limit.parse(text) for text in options.fail_if]
    report, runs = build_report(options)
    output = Path(options.output or Path(report["run"]["directory"]) / "report.html")
    _write(output, page(report))
    if options.costs:
        if not runs:
            raise DataError("--costs: no iteration was recorded in full")
        _write(Path(options.costs), json.dumps(cost_file(runs)) + "\n")
    if options.length_costs:
        costs = (report["lengths"] or {}).get("costs")
        require(costs, "--length-costs: the run has no lengths, or too few unlike ones")
        _write(Path(options.length_costs), json.dumps(costs) + "\n")
    if options.plots:
        write_plots(report, Path(options.plots))
    if options.json:
        print(json.dumps(_numbers(report), indent=1))
    else:
        more = length_lines(report["lengths"]) if report["lengths"] else []
        print("\n".join([*report["sentences"], *more, f"report: {output}"]))
    broken = [text for limit in limits if (text := limit.broken(report["totals"]))]
    for text in broken:
        print(f"{prog}: limit broken: {text}", file=sys.stderr)
    return 2 if broken else 0
