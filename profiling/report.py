#!/usr/bin/env python
"""Say where the time of a traced run went, who was slow, and what a change would gain.

    python profiling/report.py --benchmark_dir benchmark/data-1-pipeline-4-tensor-1-dpp

Writes ``report.html`` (one file, no network needed) into that directory and prints the summary.
With ``--baseline`` another run, such as the static schedule's, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from megatron.dpp.errors import ConfigError, DataError, exit_with  # noqa: E402
from megatron.dpp.plan.whatif import (  # noqa: E402
    Recorded,
    WhatIf,
    cost_file,
    effects,
    predict_all,
    recorded,
    schedule_of,
)
from megatron.dpp.trace.align import Alignment, align  # noqa: E402
from megatron.dpp.trace.analysis.limits import Limit  # noqa: E402
from megatron.dpp.trace.analysis.model import read_iterations  # noqa: E402
from megatron.dpp.trace.analysis.sentences import (  # noqa: E402
    cause_texts,
    sentences,
    straggler_text,
)
from megatron.dpp.trace.analysis.summary import Analysis, analyse, summary  # noqa: E402
from megatron.dpp.trace.analysis.timeline import timeline  # noqa: E402
from megatron.dpp.trace.progress import ProgressBar  # noqa: E402
from megatron.dpp.trace.reader import TraceFile, find_directory, open_run  # noqa: E402

_LEAST = 0.01
"""Share of an iteration that a cause must cost to be named as one."""
_TEMPLATE = Path(__file__).with_name("report_template.html")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--benchmark_dir", "--benchmark-dir", required=True, help="directory of the ranks' traces")
    add("--baseline", help="directory of another run to set beside it, such as the static schedule")
    add("--output", help="where the HTML goes (default: report.html in the benchmark directory)")
    add("--plots", metavar="DIR", help="also write PNG files there (needs matplotlib)")
    add("--json", action="store_true", help="print the numbers as JSON instead of sentences")
    add("--costs", metavar="FILE", help="also write the recorded costs, for megatron.dpp.sim")
    add("--skip", type=int, help="leading iterations to leave out (default: 1 of three or more)")
    add("--iteration", type=int, help="iteration of the timeline (default: the median one)")
    add("--threshold", type=float, default=1.15, help="times slower that make a straggler")
    add(
        "--fail-if",
        action="append",
        default=[],
        metavar="LIMIT",
        help="exit with status 2 when a total breaks it, as in 'bubble>0.25'; may be repeated",
    )
    return parser.parse_args()


def _load(
    name: str, skip: int | None, threshold: float
) -> tuple[list[TraceFile], Alignment, Analysis]:
    files = open_run(find_directory(name, _ROOT))
    bar = ProgressBar(sum(file.size for file in files))
    alignment = align(files, lambda file: bar.advance(file.size, f"aligning rank {file.rank}"))
    bar.finish()
    analysis = analyse(files, alignment, skip=skip, threshold=threshold)
    return files, alignment, analysis


def _recorded(analysis: Analysis) -> list[Recorded]:
    """Costs of the first pipeline in every iteration that is whole."""
    ranks = analysis.shape.pipelines()[0]
    parts = zip(analysis.works, analysis.links, analysis.times, strict=True)
    runs = [recorded(analysis.shape, ranks, work, links, times) for work, links, times in parts]
    return [run for run in runs if run is not None]


def _what_if(analysis: Analysis, runs: list[Recorded]) -> dict[str, Any]:
    if not runs:
        return {"what_if": [], "fidelity": 0.0, "effects": [None] * len(analysis.culprits)}
    ranks = analysis.shape.pipelines()[0]
    split, pieces = runs[-1].split, runs[-1].num_pieces
    config = schedule_of(analysis.shape.schedule, split=split, w_pieces=pieces)
    what_if = WhatIf(runs, config)
    predictions = predict_all(what_if, analysis.culprits, ranks)
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
    harmless = [s for s in report["stragglers"] if s["effect"] is not None and s["effect"] < _LEAST]
    report["stragglers"] = [s for s in report["stragglers"] if s not in harmless]
    report["without_effect"] = harmless
    report["totals"]["stragglers"] = len(report["stragglers"])


def build_report(options: argparse.Namespace) -> tuple[dict[str, Any], list[Recorded]]:
    """All numbers, sentences and the timeline of a run, as the template wants them."""
    files, alignment, analysis = _load(options.benchmark_dir, options.skip, options.threshold)
    runs = _recorded(analysis)
    report = summary(analysis) | _what_if(analysis, runs)
    number = analysis.typical().number if options.iteration is None else options.iteration
    shown = next(read_iterations(files, alignment, {number}), None)
    if shown is None:
        raise ConfigError(f"--iteration {number}: not recorded by every rank")
    order = [rank for ranks in analysis.shape.pipelines() for rank in ranks]
    report["timeline"] = timeline(shown, order)
    _set_aside_harmless(report)
    report["sentences"] = sentences(report)
    report["cause_texts"] = cause_texts()
    if options.baseline:
        report["baseline"] = summary(_load(options.baseline, options.skip, options.threshold)[2])
    return report, runs


def write_html(report: dict[str, Any], path: Path) -> None:
    """Put the report into the template; ``<`` is escaped so that no text can end the script."""
    data = json.dumps(report, separators=(",", ":")).replace("<", "\\u003c")
    text = _TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", data, 1)
    path.write_text(text, encoding="utf-8")


def _check(options: argparse.Namespace) -> None:
    if not options.threshold > 1:
        raise ConfigError(f"--threshold {options.threshold:g}: must be above 1 (times slower)")
    if options.skip is not None and options.skip < 0:
        raise ConfigError(f"--skip {options.skip}: must be at least 0")


def _run(options: argparse.Namespace) -> int:
    _check(options)
    limits = [Limit.parse(text) for text in options.fail_if]
    report, runs = build_report(options)
    output = Path(options.output or Path(report["run"]["directory"]) / "report.html")
    write_html(report, output)
    if options.costs:
        if not runs:
            raise DataError("--costs: no iteration was recorded in full")
        Path(options.costs).write_text(json.dumps(cost_file(runs)) + "\n", encoding="utf-8")
    if options.plots:
        from megatron.dpp.trace.analysis.plots import write_plots

        write_plots(report, Path(options.plots))
    numbers = {name: report[name] for name in report if name not in ("timeline", "cause_texts")}
    print(json.dumps(numbers, indent=1) if options.json else "\n".join(report["sentences"]))
    if not options.json:
        print(f"report: {output}")
    broken = [text for limit in limits if (text := limit.broken(report["totals"]))]
    for text in broken:
        print(f"report.py: limit broken: {text}", file=sys.stderr)
    return 2 if broken else 0


def main() -> int:
    """Exit status: 0, 2 when a ``--fail-if`` limit is broken, 1 after an error."""
    try:
        return _run(_arguments())
    except (ConfigError, DataError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    exit_with(main)
