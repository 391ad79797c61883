"""Runs of ``pretrain_gpt.py`` one after the other.

Argument: a JSON file with a port and a command line for each.
"""

import json
import os
import sys
from pathlib import Path


def run(command_lines: list[tuple[int, list[str]]]) -> int:
    from megatron.dpp.train.pretrain import main

    for port, words in command_lines:
        os.environ["MASTER_PORT"] = str(port)  # the last run's may be closing yet
        print(f"--- {' '.join(words)}", flush=True)
        if code := main("gpt", words):
            return code
        _forget()
    return 0


def _forget() -> None:
    """What megatron-core keeps of a run that has left its process group."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()


if __name__ == "__main__":
    sys.exit(run(json.loads(Path(sys.argv[1]).read_text())))
