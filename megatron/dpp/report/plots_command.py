"""``megatron-dpp plots``: draw a traced run as PNG or SVG files.

megatron-dpp plots --benchmark_dir runs/latest --output png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.dpp.command_line import guarded, new_parser
from megatron.dpp.errors import require
from megatron.dpp.report.pictures.charts import write_plots
from megatron.dpp.report.pictures.picture import FORMATS
from megatron.dpp.report.report_command import add_run_options, build_report


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp plots") -> int:
    """Run the command; returns 1 after an error."""
    parser = new_parser(prog, "Draw loss, times, timeline and memory of a traced run.")
    add_run_options(parser)
    add = parser.add_argument
    add("--output", metavar="DIR", help="default: plots in the run's directory")
    add("--format", choices=FORMATS, default="png", help="png needs matplotlib, svg nothing (png)")
    add("--dark", action="store_true", help="PNG for a dark page; an SVG follows its reader")
    options = parser.parse_args(argv)
    return guarded(prog, lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    require(not (options.dark and options.format == "svg"), "--dark: an SVG has both colours")
    report, _ = build_report(options)
    folder = Path(options.output or Path(report["run"]["directory"]) / "plots")
    theme = "dark" if options.dark else "light"
    flag = "--format png"
    for path in write_plots(report, folder, kind=options.format, theme=theme, flag=flag):
        print(path)
    return 0
