"""Runs ``train_script.py`` several times, each in a fork of one process that has imported Megatron.

Argument: a JSON file with a list of ``[name, port, words]``. What rank R of a run prints goes to
``NAME.R.log`` beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("train_script.py"))


def child(name: str, port: int, words: list[str], folder: Path) -> None:
    """One run, in this process."""
    from megatron.dpp import run

    log = os.open(folder / f"{name}.{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sys.argv = ["run", SCRIPT, *words]
    status = 1
    try:
        run.main()
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:  # shown in the log
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(path: Path) -> int:
    from megatron.dpp.core import cpu

    support = cpu.install(host=True)
    import megatron.training.argument_utils
    import megatron.training.arguments
    import megatron.training.training  # noqa: F401

    support.close()
    for name, port, words in json.loads(path.read_text()):
        pid = os.fork()
        if not pid:
            child(name, port, words, path.parent)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            log = path.parent / f"{name}.{os.environ['RANK']}.log"
            print(f"{name}: status {status}\n{log.read_text()[-6000:]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
