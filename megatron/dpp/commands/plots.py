"""``megatron-dpp plots``: draw a traced run as PNG files.

megatron-dpp plots --benchmark_dir benchmark/data-1-pipeline-4-tensor-1-dpp --output png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.dpp.commands.common import guarded, new_parser
from megatron.dpp.commands.report import add_run_options, build_report
from megatron.dpp.trace.analysis.plots import write_plots


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp plots") -> int:
    """Run the command; returns 1 after an error."""
    parser = new_parser(prog, "Draw the timeline, the times and the memory of a run as PNG files.")
    add_run_options(parser)
    parser.add_argument("--output", metavar="DIR", help="default: plots in the run's directory")
    options = parser.parse_args(argv)
    return guarded(prog, lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    report, _ = build_report(options)
    folder = Path(options.output or Path(report["run"]["directory"]) / "plots")
    for path in write_plots(report, folder):
        print(path)
    return 0
