"""The sequence lengths of a run's microbatches: a file per replica beside the trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.files import strict_json
from megatron.dpp.files.safe_files import open_text_to_write, read_bytes

FILE = "lengths-d{}.jsonl"
"""Name of a replica's file."""


@dataclass(frozen=True)
class StepLengths:
    """One step of a replica.

    Args:
        microbatches: lengths of each one's sequences, in the order that ran.
        drawn: place of each microbatch in the drawn order.
        padded: tokens with padding.
    """

    microbatches: list[list[int]]
    drawn: list[int]
    padded: int

    def as_drawn(self) -> list[list[int]]:
        """The microbatches in the drawn order."""
        pairs = zip(self.drawn, self.microbatches, strict=True)
        return [each for _, each in sorted(pairs, key=lambda pair: pair[0])]


def write_step(path: Path, iteration: int, step: StepLengths) -> None:
    """Appends a step to a replica's file."""
    with open_text_to_write(path, append=True) as file:
        file.write(json.dumps({"iteration": iteration, **vars(step)}) + "\n")


def read_steps(folder: Path) -> dict[int, StepLengths]:
    """The steps of replica 0 by iteration; empty where a run wrote no lengths.

    Raises:
        DataError: a line cannot be read.
    """
    path = folder / FILE.format(0)
    if not path.is_file():
        return {}
    steps = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        try:
            found = dict(strict_json.loads(line))
            iteration = int(found.pop("iteration"))
            step = StepLengths(**found)
            if sorted(step.drawn) != list(range(len(step.microbatches))):
                raise ValueError("drawn names other microbatches")
            numbers = [step.padded, *(each for part in step.microbatches for each in part)]
            if not all(type(each) is int for each in numbers):
                raise ValueError("a length is no whole number")
            steps[iteration] = step
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            why = one_line(error, 200)
            raise DataError(f"{path}, line {number}: not a step's lengths ({why})") from error
    return steps
