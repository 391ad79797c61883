#!/usr/bin/env python
"""Merge the trace files of all ranks into one that opens in Perfetto (https://ui.perfetto.dev).

    python profiling/aggregate.py --benchmark_dir benchmark/data-1-pipeline-4-tensor-1-dpp

Works from the repository's root and from ``profiling/``. Says how well the ranks' clocks could be
aligned.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from megatron.dpp.errors import DataError, exit_with  # noqa: E402
from megatron.dpp.trace.align import Alignment  # noqa: E402
from megatron.dpp.trace.merge import merge  # noqa: E402
from megatron.dpp.trace.progress import ProgressBar  # noqa: E402
from megatron.dpp.trace.reader import TraceFile, find_directory, open_run  # noqa: E402


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--benchmark_dir",
        "--benchmark-dir",
        required=True,
        help="directory with the ranks' files, from here or from the repository's root",
    )
    parser.add_argument(
        "--output",
        help="merged trace; .json.gz compresses it (default: aggregated.json in that directory)",
    )
    parser.add_argument(
        "--allow-missing", action="store_true", help="merge although some ranks' files are missing"
    )
    return parser.parse_args()


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


def _run(options: argparse.Namespace) -> None:
    directory = find_directory(options.benchmark_dir, _ROOT)
    files = open_run(directory, allow_missing=options.allow_missing)
    output = Path(options.output) if options.output else files[0].path.parent / "aggregated.json"
    bar = ProgressBar(2 * sum(file.size for file in files))

    def progress(phase: str, file: TraceFile) -> None:
        bar.advance(file.size, f"{phase} rank {file.rank}")

    alignment, count = merge(files, output, progress=progress)
    bar.finish()
    print(_describe(alignment))
    short = [file.rank for file in files if not file.complete]
    if short:
        print(f"cut short (the run was killed or is still running): ranks {_ranges(short)}")
    print(f"{count} events of {len(files)} ranks in {output}; open it in https://ui.perfetto.dev")


def main() -> int:
    """Run the script; the exit status is 1 after an error that the user can mend."""
    try:
        _run(_arguments())
    except (DataError, OSError) as error:
        print(f"aggregate.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
