"""``megatron-dpp plots``: draw a run as SVG files.

megatron-dpp plots runs/latest --output pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.report.building import build_report
from megatron.dpp.report.pictures.gallery import write_plots
from megatron.dpp.report.report_command import add_run_options


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = new_parser(prog, "Draw loss, times, timeline and memory of a run as SVG files.")
    add_run_options(parser)
    parser.add_argument("--output", metavar="DIR", help="default: plots in the run's directory")
    return parser


def _run(options: argparse.Namespace) -> int:
    report, _ = build_report(options)
    found = report.pipeline
    where = found.run.directory if found else report.training.home
    folder = Path(options.output or Path(where, "plots"))
    for path in write_plots(report, folder):
        print(path)
    return 0


main = command("megatron-dpp plots", _parser, _run)
