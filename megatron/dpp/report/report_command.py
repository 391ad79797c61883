"""``megatron-dpp report``: the loss of a run, and where the time of a traced one went.

    megatron-dpp report runs/latest
    megatron-dpp report runs/latest --baseline runs/static

Writes ``report.html`` (one file, no network needed) into the run's directory and prints the
findings. With a baseline it says whether losses, norms and learning rates are equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import DataError
from megatron.dpp.files.safe_files import replacing
from megatron.dpp.report.analysis.sentences import NOT_OF_SLICES
from megatron.dpp.report.building import build_report
from megatron.dpp.report.pictures.page import page
from megatron.dpp.report.whatif import cost_file

_PAGE = "report.html"


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    text = (
        "The loss of a run, and with a trace one step's timeline, where the time went, who was "
        "slow, and what a change would gain."
    )
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="home or traces of a run (default: runs/latest)")
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same")
    add("--baseline", metavar="RUN", help="another run to compare with, number by number")
    add("--skip", type=int, metavar="N", help="leave out N leading iterations (default: 1 of >= 3)")
    add("--iteration", type=int, metavar="N", help="timeline of iteration N (default: the median)")
    add("--metrics-file", metavar="FILE", help="losses (default: metrics.jsonl in the run's home)")
    add("--threshold", type=float, default=1.15, metavar="X", help="X times slower is a straggler")
    add("--output", metavar="FILE", help="the HTML (default: report.html in the run's directory)")
    add("--json", action="store_true", help="print the numbers as JSON instead of sentences")
    add("--costs", metavar="FILE", help="also write the recorded costs, for megatron-dpp sim")
    return parser


def _run(options: argparse.Namespace) -> int:
    report, runs = build_report(options)
    found = report.pipeline
    home = found.files[0].path.parent if found else report.training.home
    output = Path(options.output or home / _PAGE)
    _write(output, page(report))
    if options.costs:
        if not runs:
            why = NOT_OF_SLICES if found and found.sliced else "no iteration was recorded in full"
            raise DataError(f"--costs: {why}")
        _write(Path(options.costs), json.dumps(cost_file(runs)) + "\n")
    if options.json:
        print(json.dumps(report.numbers(), indent=1))
    else:
        print("\n".join([*report.sentences, f"report: {output}"]))
    return 0


def _write(path: Path, text: str) -> None:
    with replacing(str(path)) as file:
        file.write(text.encode(errors="backslashreplace"))


main = command("megatron-dpp report", build_parser, _run)
