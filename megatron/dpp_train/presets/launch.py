"""One torchrun per node, and an end for everything that it started.

torchrun and its ranks write into the run's log; this process shows the progress and stays until the
run has ended. Ctrl-C, SIGTERM and SIGHUP end the run in one line; when this process is killed, the
kernel ends torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megatron.dpp.errors import FAILED, print_error
from megatron.dpp.processes import are_stopped, bound_to_this, stopped
from megatron.dpp.report.run_files import write_state
from megatron.dpp_train.presets.console import Progress

_BETWEEN, _LOOK_SECONDS = 0.2, 3.0
"""Seconds between looks at the metrics, and at processes that may be stopped."""
_GRACE_SECONDS = 40.0
"""torchrun gives its ranks 30 seconds after a SIGTERM."""
_PR_SET_CHILD_SUBREAPER = 36
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*: (?P<rank>\d+).*?exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.DOTALL,
)
_ERROR_LINE = re.compile(r"[\w.]+(Error|Exception)(: .*)?|.{1,40}: error: .*")
_TAIL_BYTES = 1 << 18
_LONGEST = 1000
"""Characters of a rank's error."""


class _Ended(BaseException):
    """A signal that ends the run."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise _Ended(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    words: Sequence[str],
    env: Mapping[str, str],
    directory: Path,
    log: Path,
    flags: Mapping[str, Any],
) -> int:
    """Start torchrun, show the progress, and wait until nothing of it is left; the exit status.

    Args:
        words: torchrun and everything behind it.
        directory: of the run.
        log: file of all output of torchrun and its ranks.
        flags: of the training script.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # ranks of a torchrun that died
    scratch = directory / f".torchrun-{os.getpid()}"  # torchrun's own files
    steps, save = flags.get("--train-iters"), flags.get("--save")
    progress = Progress(Path(flags["--metrics-file"]), None if steps is None else int(steps))
    _note(directory, "starting")
    with _signals_end_it(), log.open("ab") as output:
        process = subprocess.Popen(
            words,
            env={**env, "PET_LOG_DIR": str(scratch)},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=bound_to_this(),
        )
        try:
            code = _follow(process, progress, directory)
        except _Ended as ended:
            progress.end()
            return _stop(process, ended.number, directory, save)
        finally:
            _end_all(process)
            failure = "" if process.returncode == 0 else _failure(log, scratch)
            shutil.rmtree(scratch, ignore_errors=True)
    progress.end()
    if code == 0:
        _note(directory, "finished")
        print(progress.summary())
        return 0
    _note(directory, "failed", by=failure or None)
    print_error(failure or f"torchrun ended with exit code {code}")
    print(f"log      {log}{how_to_go_on(save)}", file=sys.stderr)
    return FAILED


def _note(directory: Path, state: str, by: str | None = None) -> None:
    """Write the run's state. A directory that is lost meanwhile does not end the training."""
    try:
        write_state(directory, state, by=by)
    except OSError as error:
        why = f"{directory}: its state cannot be written ({error.strerror})"
        print(f"warning: {why}", file=sys.stderr)


def _follow(process: subprocess.Popen[bytes], progress: Progress, directory: Path) -> int:
    """The exit code of torchrun, once it has ended."""
    running, halted, next_look = False, list[str](), 0.0
    while (code := process.poll()) is None:
        progress.look()
        if time.monotonic() > next_look:
            before, halted = halted, stopped(process.pid)
            if halted and halted != before:
                progress.say(f"warning: {are_stopped(halted)}")
            next_look = time.monotonic() + _LOOK_SECONDS
        if progress.last and not running:
            running = True
            _note(directory, "running")
        time.sleep(_BETWEEN)
    progress.look()
    return code


def _stop(
    process: subprocess.Popen[bytes], number: signal.Signals, directory: Path, save: str | None
) -> int:
    """End a run that a signal asks to end; a second one ends it at once."""
    by = "Ctrl-C" if number == signal.SIGINT else number.name
    with contextlib.suppress(_Ended, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGTERM)
        process.wait(_GRACE_SECONDS)
    with contextlib.suppress(_Ended):
        _end_all(process)
    _note(directory, "stopped", by=by)
    print(f"stopped by {by}; nothing is left running{how_to_go_on(save)}", file=sys.stderr)
    return 128 + number


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of torchrun and its ranks. Its orphans are children of this process."""
    import psutil  # type: ignore[import-untyped]

    left = psutil.Process().children(recursive=True)
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()
    psutil.wait_procs(left, timeout=5)
    process.wait()


def _failure(log: Path, scratch: Path) -> str:
    """One line about the rank that failed first: its number, process, exit code and error."""
    text = ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    found = _ROOT_CAUSE.search(text)
    error = _told(scratch, found["rank"] if found else None) or _last_error(text)
    error = error[:_LONGEST]  # some name all parts of a checkpoint
    if found is None:
        return error
    code = int(found["code"])
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {found['rank']} (process {found['pid']}) {how}" + (f": {error}" if error else "")


def _told(scratch: Path, rank: str | None) -> str:
    """The error that a rank left for torchrun."""
    for path in sorted(scratch.glob(f"*/attempt_*/{rank or '*'}/error.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(path.read_text(encoding="utf-8"))
            return " ".join(str(told["message"]["message"]).split())
    return ""


def _last_error(text: str) -> str:
    """The last line of the log that names an error, but torchrun's own; behind an error without
    words the statement that raised it."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in text.splitlines()]
    for before, line in reversed(list(itertools.pairwise(["", *lines]))):
        if _ERROR_LINE.fullmatch(line) and "ChildFailedError" not in line:
            said = re.sub(r"^.{1,40}?: error: ", "", line)  # of this program
            return said if ": " in line else f"{line}: {before}"
    return ""


def how_to_go_on(save: str | None) -> str:
    """The checkpoint that an ended run leaves, and the option that goes on from it."""
    try:
        step = Path(save or "", "latest_checkpointed_iteration.txt").read_text(encoding="utf-8")
    except (OSError, ValueError):  # or it is no text
        return ""
    return f"; go on from step {step.strip()} with --resume-from {save}" if save else ""
