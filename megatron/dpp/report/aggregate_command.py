"""``megatron-dpp aggregate``: merge the trace files of all ranks into one for Perfetto.

    megatron-dpp aggregate --benchmark_dir benchmark/data-1-pipeline-4-tensor-1-dpp

Prints how well the ranks' clocks could be aligned.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.dpp.command_line import command, new_parser, progress_bar
from megatron.dpp.report.align import Alignment
from megatron.dpp.report.merge import merge
from megatron.dpp.report.reader import TraceFile, open_run
from megatron.dpp.report.run_files import find_run


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Merge the trace files of all ranks into one for ui.perfetto.dev."
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="home or traces of a run (default: runs/latest)")
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same")
    add("--output", metavar="FILE",
        help="merged trace; .json.gz compresses it (default: DIR/aggregated.json)")  # fmt: skip
    add("--allow-missing", action="store_true", help="merge although files of ranks are missing")
    return parser


def _run(options: argparse.Namespace) -> int:
    name = options.benchmark_dir or options.run or "runs/latest"
    files = open_run(find_run(name).need_traces(), allow_missing=options.allow_missing)
    output = Path(options.output) if options.output else files[0].path.parent / "aggregated.json"
    with progress_bar(2 * sum(file.size for file in files)) as bar:

        def progress(phase: str, file: TraceFile) -> None:
            bar.set_postfix_str(f"{phase} rank {file.rank}", refresh=False)
            bar.update(file.size)

        alignment, count = merge(files, output, progress=progress)
    print(_describe(alignment))
    short = [file.rank for file in files if not file.complete]
    if short:
        print(f"cut short (the run was killed or is still running): ranks {_ranges(short)}")
    print(f"{count} events of {len(files)} ranks in {output}; open it in https://ui.perfetto.dev")
    return 0


def _describe(alignment: Alignment) -> str:
    clocks = alignment.summary()
    if len(clocks) == 1:
        return "clocks: all ranks read one clock; nothing to align"
    lines = [
        f"clocks: {len(clocks)}, aligned by messages; "
        f"uncertainty at most {alignment.uncertainty_ns / 1000:.1f} us"
    ]
    lines += [
        f"  ranks {_ranges(clock['ranks'])}: offset {clock['offset_ns'] / 1e6:+.3f} ms, "
        f"within {clock['uncertainty_ns'] / 1000:.1f} us"
        for clock in clocks
    ]
    return "\n".join(lines)


def _ranges(ranks: list[int]) -> str:
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


main = command("megatron-dpp aggregate", _parser, _run)
