"""A process group of an unmodified Megatron-LM whose arms take turns: its run, and what its ranks
record. Used by bench_plugin.py and bench_parallel.py.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
import megatron_sources

Arm = tuple[str, str, dict[str, Any]]
"""Name, kind and settings, as plugin_entry.py takes them."""
LOGGED = ("dynamic pipeline", "static pipeline", "CUDA graphs")
"""How the lines of a log begin that are printed."""
_ENTRY = Path(__file__).with_name("plugin_entry.py")
_SAY_EVERY = 20.0
_LOOK_EVERY = 0.5
"""Seconds between lines about the progress, at most, and between looks at it."""


class Line(NamedTuple):
    """A step of a rank, as plugin_entry.py records it.

    Args:
        number: in the arm's turn.
        allocated: most bytes in the turn so far.
        reserved: as ``allocated``.
        loss: None on ranks without the last stage.
        norm: of the gradients.
        captured: some rank captured a CUDA graph in this step.
    """

    arm: str
    number: int
    seconds: float
    allocated: int
    reserved: int
    loss: float | None
    norm: float
    captured: bool


def run(
    root: Path,
    words: Sequence[str],
    arms: Sequence[Arm],
    *,
    processes: int,
    queues: str,
    block: int,
    rounds: int,
    microbatches: int,
    lengths: Sequence[int] = (),
    documents: Sequence[Sequence[int]] = (),
    turn: tuple[str, int, int] = ("", 0, 1),
    seconds: float,
    stop: harness.Stop,
) -> tuple[list[Line], str]:
    """Run ``root``'s script with these flags, and print which arm and step runs.

    Args:
        block: steps of an arm's turn.
        rounds: turns of each arm.
        microbatches: of a step, on each rank.
        documents: lengths of the documents in each packed row.
        turn: as plugin_entry.py takes it.
        seconds: the most that it may take.
        stop: ends it, too.

    Returns:
        The lines of all ranks, one rank after the other, and the reason why the ranks did not end
        by themselves; empty if they did.
    """
    with tempfile.TemporaryDirectory() as own:
        record = Path(own) / "steps"
        variables = {
            "CUDA_DEVICE_MAX_CONNECTIONS": queues, "BENCH_SCRIPT": str(root / "pretrain_gpt.py"),
            "BENCH_RECORD": str(record), "BENCH_BLOCK": str(block),
            "BENCH_MICROBATCHES": str(microbatches),
            "BENCH_LENGTHS": ",".join(map(str, lengths)), "BENCH_ARMS": json.dumps(arms),
            "BENCH_DOCUMENTS": json.dumps(documents), "BENCH_TURN": json.dumps(turn),
        }  # fmt: skip
        steps = block * rounds * len(arms)
        started = megatron_sources.start(
            root, _ENTRY, [*words, "--train-iters", str(steps)], port=harness.free_port(),
            ranks=processes, log=record, paths=[megatron_sources.for_old_python(Path(own))],
            more=[variables] * processes,
        )  # fmt: skip
        files = [Path(f"{record}.{rank}") for rank in range(processes)]
        progress = _Progress(files, [name for name, _, _ in arms], block, steps)

        def look() -> str:
            progress.look()
            return stop.reason

        reason = megatron_sources.why_failed(started, seconds, look)
        progress.end()
        logs = [Path(f"{file}.log").read_text(encoding="utf-8", errors="replace") for file in files]
        told = [line for log in logs for line in log.splitlines() if line.startswith(LOGGED)]
        told += [reason, *(log[-3000:] for log in logs if not stop.reason)] if reason else []
        print("\n".join(filter(None, dict.fromkeys(told))), flush=True)
        return [line for file in files for line in _lines(file)], reason


def timed(lines: Sequence[Line], untimed: int, passes: int = 0) -> dict[str, list[list[Line]]]:
    """The timed steps of each arm, by turn; turns and arms without one are left out.

    Args:
        lines: of whole ranks, one rank after the other.
        untimed: first steps of a turn that do not count. Neither do those up to the last in which
            a CUDA graph was captured.
        passes: first turns of each arm that do not count.
    """
    turns: dict[str, list[list[Line]]] = defaultdict(list)
    for line in lines:
        if line.number == 0:
            turns[line.arm].append([])
        turn = turns[line.arm][-1]
        if line.captured:
            turn.clear()
        elif line.number >= untimed:
            turn.append(line)
    found = {name: [turn for turn in of_arm[passes:] if turn] for name, of_arm in turns.items()}
    return {name: of_arm for name, of_arm in found.items() if of_arm}


def print_untimed(lines: Sequence[Line], untimed: int) -> None:
    """Say which arms have run without a timed step, and why."""
    known = timed(lines, untimed)
    for name in dict.fromkeys(line.arm for line in lines):
        if name not in known:
            mine = [line for line in lines if line.arm == name]
            last = max((line.number + 1 for line in mine if line.captured), default=0)
            most = max(line.number + 1 for line in mine)
            graphs = f", and CUDA graphs were captured up to step {last}" if last else ""
            print(
                f"{name}: no timed step: its longest turn has {most} steps (--block), of which the "
                f"first {untimed} are not timed (--untimed){graphs}"
            )


def _lines(file: Path) -> list[Line]:
    """The lines of one rank that are whole."""
    if not file.is_file():
        return []
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
    return [Line(*json.loads(line)) for line in whole.splitlines()]


class _Progress:
    """Prints which arm and step runs, when a turn begins and every 20 s.

    Args:
        files: lines of each rank.
        arms: names in the order of their turns.
        block: steps of a turn.
        steps: of the process group.
    """

    def __init__(self, files: Sequence[Path], arms: Sequence[str], block: int, steps: int) -> None:
        self._files, self._arms, self._block, self._steps = files, arms, block, steps
        self._begin = self._said = time.monotonic()
        self._looked, self._turn = 0.0, -1

    def look(self) -> None:
        now = time.monotonic()
        if now < self._looked + _LOOK_EVERY:
            return
        self._looked = now
        lines = self._lines()
        begins = lines and len(lines) < self._steps and len(lines) // self._block != self._turn
        if begins or now > self._said + _SAY_EVERY:
            self._said, self._turn = now, len(lines) // self._block
            self._say(lines)

    def end(self) -> None:
        """Say how many steps were done."""
        self._say(self._lines())

    def _lines(self) -> list[Line]:
        """Those of the rank that is behind the others."""
        return min((_lines(file) for file in self._files), key=len)

    def _say(self, lines: Sequence[Line]) -> None:
        turn = len(lines) // self._block
        took = f", the last took {1e3 * lines[-1].seconds:.0f} ms" if lines else ""
        arm = self._arms[turn % len(self._arms)]
        runs = f"; turn {turn + 1} of {self._steps // self._block}, {arm}, runs"
        if len(lines) == self._steps:
            runs = ""
        seconds = time.monotonic() - self._begin
        print(
            f"{seconds:.0f} s: {len(lines)} of {self._steps} steps are done{took}{runs}", flush=True
        )
