"""Runs of ``pretrain_gpt.py`` that write down sizes.

Arguments: a JSON file with their command lines, and one for what each rank found: the sizes that
were announced, and those of the batches that were read.
"""

import json
import os
import sys
from pathlib import Path


def main(lines: Path, found: Path) -> int:
    from megatron.dpp import DppSchedule
    from megatron.dpp_train.data import sequences
    from tests.loop.runs_worker import run

    announced, read = [], []
    announce, collate = DppSchedule.announce, sequences.collate

    def spied_announce(schedule, sizes):
        announced.append(list(sizes))
        announce(schedule, sizes)

    def spied_collate(samples, settings):
        batch = collate(samples, settings)
        read.append(batch["tokens"].numel())
        return batch

    DppSchedule.announce, sequences.collate = spied_announce, spied_collate
    code = run(lines)
    path = found.with_suffix(f".rank{os.environ['RANK']}")
    path.write_text(json.dumps({"announced": announced, "read": read}))
    return code


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
