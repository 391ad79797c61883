"""Runs of ``pretrain_gpt.py`` one after the other.

Arguments: a JSON file with their command lines; ``with-engine`` for the stand-in for Transformer
Engine.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path


def run(path: Path) -> int:
    from megatron.dpp_train.loop.pretrain import main

    for number, words in enumerate(json.loads(path.read_text())):
        os.environ["MASTER_PORT"] = _port(path.with_suffix(f".port{number}"))
        print(f"--- {' '.join(words)}", flush=True)
        if PLAN_AS_DYNAMIC in words:
            words.remove(PLAN_AS_DYNAMIC)
            _plan_as_dynamic()
        if code := main("gpt", words):
            return code
        _forget()
    return 0


PLAN_AS_DYNAMIC = "PLAN-AS-DYNAMIC"
"""In place of a flag: ``--order planned`` plans for the dynamic schedule from here on."""


def _plan_as_dynamic() -> None:
    from megatron.dpp_train.data import sequences

    model = sequences.pipeline_model
    sequences.pipeline_model = lambda args: replace(model(args), policy="dynamic")


def _port(path: Path) -> str:
    """For this run, as rank 0 finds it free just now: the one before may be closing its own yet,
    and its many connections may have taken any that was free earlier."""
    from tests.runtime.launcher import free_port

    if os.environ["RANK"] == "0":
        scratch = path.with_suffix(".new")
        scratch.write_text(str(free_port()))
        scratch.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def _forget() -> None:
    """Resets the state that megatron-core keeps after a run has left its process group."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()


if __name__ == "__main__":
    if "with-engine" in sys.argv:
        from tests.runtime import te_double

        te_double.install()
    sys.exit(run(Path(sys.argv[1])))
