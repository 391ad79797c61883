"""``megatron-dpp plots``: draw a run as SVG files.

megatron-dpp plots runs/latest --output pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.dpp.command_line import guarded, new_parser
from megatron.dpp.report.building import build_report
from megatron.dpp.report.pictures.gallery import write_plots
from megatron.dpp.report.report_command import add_run_options


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp plots") -> int:
    """Run the command; returns 1 after an error."""
    parser = new_parser(prog, "Draw loss, times, timeline and memory of a run as SVG files.")
    add_run_options(parser)
    parser.add_argument("--output", metavar="DIR", help="default: plots in the run's directory")
    options = parser.parse_args(argv)
    return guarded(prog, lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    report, _ = build_report(options)
    found = report.pipeline
    where = found.run.directory if found else report.training.home
    folder = Path(options.output or Path(where, "plots"))
    for path in write_plots(report, folder):
        print(path)
    return 0
