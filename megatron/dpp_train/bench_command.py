"""``megatron-dpp bench NAME``: run a benchmark of the source tree, ``profiling/bench_NAME.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.dpp.command_line import WHERE_THE_REST_IS, from_source_tree, guarded
from megatron.dpp.errors import ConfigError, did_you_mean


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp bench") -> int:
    """Exit status of the benchmark; 0 for the list of names, 2 where there is no such benchmark."""
    return guarded(prog, lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(words: list[str]) -> int:
    scripts = {
        path.stem.removeprefix("bench_").replace("_", "-"): path
        for path in sorted(from_source_tree("profiling").glob("bench_*.py"))
        if "__main__" in path.read_text(encoding="utf-8")
    }
    if not words or words[0] in ("-h", "--help"):
        print("usage: megatron-dpp bench NAME [options]     (NAME --help lists the options)\n")
        for name, path in scripts.items():
            lines = path.read_text(encoding="utf-8").splitlines()
            summary = next(line for line in lines if line.startswith('"""')).strip('"')
            print(f"  {name:<15} {summary}")
        print(f"\n{WHERE_THE_REST_IS}")
        return 0
    name = words[0].replace("_", "-")
    if name not in scripts:
        raise ConfigError(
            f"no benchmark {words[0]!r}{did_you_mean(name, scripts)}: expected one of "
            f"{', '.join(scripts)}"
        )
    sys.stdout.flush()
    # Benchmarks import the modules beside them, which the launcher's PYTHONSAFEPATH would hide.
    env = {each: value for each, value in os.environ.items() if each != "PYTHONSAFEPATH"}
    # In this process's place, so that signals meet the benchmark, which reports before it ends.
    return os.execve(sys.executable, [sys.executable, str(scripts[name]), *words[1:]], env)
