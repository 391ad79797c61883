"""``megatron-dpp report``: curves of runs, and where the time of a traced one went.

    megatron-dpp report runs/latest
    megatron-dpp report runs/a runs/b

Writes ``report.html`` (one file, no network needed) into the first run's directory and prints the
summary.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import DataError, require
from megatron.dpp.files.safe_files import open_text_to_write
from megatron.dpp.report.analysis.sentences import NOT_OF_SLICES
from megatron.dpp.report.building import build_report
from megatron.dpp.report.length_report import length_lines
from megatron.dpp.report.pictures.gallery import write_plots
from megatron.dpp.report.pictures.page import page
from megatron.dpp.report.recorded import cost_file

_PAGE = "report.html"


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    text = (
        "Curves of a run, or of several beside each other. With a trace: where the time went, who "
        "was slow, and what a change would gain."
    )
    parser = new_parser(prog, text, "[RUN ...] [options]")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="homes or traces of runs (default: runs/latest)")
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same, for the first run")
    add("--baseline", metavar="DIR", help="the same, for the last run")
    add("--skip", type=int, metavar="N", help="leave out N leading iterations (default: 1 of >= 3)")
    add("--iteration", type=int, metavar="N", help="timeline of iteration N (default: the median)")
    add("--metrics-file", metavar="FILE", help="loss and tokens/s (default: of the run's home)")
    add("--threshold", type=float, default=1.15, metavar="X", help="X times slower is a straggler")
    add("--output", metavar="FILE", help="the HTML (default: report.html in the run's directory)")
    add("--plots", metavar="DIR", help="also write pictures there, as SVG")
    add("--json", action="store_true", help="print the numbers as JSON instead of sentences")
    add("--costs", metavar="FILE", help="also write the recorded costs, for megatron-dpp sim")
    add("--length-costs", metavar="FILE",
        help="also write times over sequence lengths, for train --length-costs")  # fmt: skip
    return parser


def _write(path: Path, text: str) -> None:
    with open_text_to_write(path) as file:
        file.write(text)


def _run(options: argparse.Namespace) -> int:
    report, runs = build_report(options)
    found, training = report.pipeline, report.training
    if found is None:
        _check_untraced(options)
    output = Path(options.output or Path(found.run.directory if found else training.home, _PAGE))
    _write(output, page(report))
    lengths = found.lengths if found else None
    if options.costs:
        if not runs:
            sliced = found and found.run.sliced
            why = NOT_OF_SLICES if sliced else "no iteration was recorded in full"
            raise DataError(f"--costs: {why}")
        _write(Path(options.costs), json.dumps(cost_file(runs)) + "\n")
    if options.length_costs:
        costs = lengths.costs if lengths else None
        require(costs, "--length-costs: the run has no lengths, or too few unlike ones")
        _write(Path(options.length_costs), json.dumps(costs) + "\n")
    if options.plots:
        write_plots(report, Path(options.plots))
    if options.json:
        print(json.dumps(report.numbers(), indent=1))
    else:
        more = length_lines(lengths) if lengths else []
        print("\n".join([*report.sentences, *more, f"report: {output}"]))
    return 0


def _check_untraced(options: argparse.Namespace) -> None:
    """Refuse options that need a trace.

    Raises:
        ConfigError: one was given.
    """
    for name in ("costs", "length_costs"):
        given = getattr(options, name)
        require(not given, f"--{name.replace('_', '-')} needs a trace, which this run has not")


main = command("megatron-dpp report", build_parser, _run)
