"""Children answer, or their death is told; the kernel bounds what they take."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.child import Child, Died, in_order, limit_time
from megatron.dpp_train.data.encode import Begun
from megatron.dpp_train.data.token_files import token_type


def hangs() -> None:
    """One call into C, in which Python handles no signal."""
    limit_time(1.0)
    _ = 7 ** (10**9)


DOES: dict[str, Callable[[], Any]] = {
    "answers": lambda: 42,
    "hangs": hangs,
    "kills": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "aborts": os.abort,
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leaves": lambda: os._exit(3),
    "refuses": lambda: int("x"),
    "grows": lambda: len(bytearray(1 << 34)),
}


def begin() -> Callable[[str], Any]:
    return lambda what: DOES[what]()


def not_begun() -> Callable[[str], Any]:
    raise DataError("no such file")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("hangs", "it takes too much processor time"),
        ("kills", "its process ended by SIGKILL"),
        ("aborts", "its process ended by SIGABRT"),
        ("leaves", "its process ended with exit code 3"),
    ],
)
def test_a_death_is_told(what: str, said: str) -> None:
    child = Child(begin)
    child.send("answers")
    assert child.receive() == 42
    child.send(what)
    with pytest.raises(Died, match=said):
        child.receive()
    child.close()


def test_errors_come_back_and_the_child_goes_on() -> None:
    with pytest.raises(DataError, match="no such file"):
        Child(not_begun)
    child = Child(begin)
    for what, kind, said in (
        ("refuses", RuntimeError, "invalid literal"),
        ("grows", DataError, "more memory is needed"),
    ):
        child.send(what)
        with pytest.raises(kind, match=said):
            child.receive()
    child.send("answers")
    assert child.receive() == 42
    child.close()
    child.close()


def test_a_stopped_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.dpp_train.data.child.LOOK_SECONDS", 0.5)
    with pytest.raises(DataError, match=r"does not answer: process \d+ \(.*\) is stopped on"):
        list(in_order(1, begin, enumerate(["answers", "stops", "answers"])))


def test_a_worker_that_dies_at_its_start_or_fails_ends_the_work() -> None:
    with pytest.raises(DataError, match=r"worker process cannot start: .* SIGABRT"):
        list(in_order(2, os.abort, enumerate(["answers"] * 20)))
    with pytest.raises(DataError, match="no such file"):
        list(in_order(2, not_begun, enumerate(["answers"] * 20)))
    with pytest.raises(RuntimeError, match="invalid literal"):
        list(in_order(1, begin, enumerate(["refuses"] + ["answers"] * 20)))


def test_answers_come_in_order_around_deaths() -> None:
    asked = ["answers", "aborts", "answers", "leaves"] + ["answers"] * 20
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    found = list(in_order(2, begin, enumerate(asked)))
    assert [number for number, _ in found] == [*range(len(asked))]
    for number, answer in found:
        assert isinstance(answer, Died) if asked[number] in ("aborts", "leaves") else answer == 42
    next(in_order(2, begin, enumerate(asked)))  # what is left of it ends, too
    time.sleep(0.2)
    after = psutil.Process().children(recursive=True)
    left = [each for each in after if each.pid not in before and each.status() != "zombie"]
    assert len(left) <= 2  # the server that forks, and what tracks its resources


class Killed:
    """An encoder that the system kills."""

    def __init__(self, args: argparse.Namespace, _: float) -> None:
        self._dtype = token_type(args.vocab_size)

    def __call__(self, lines: list[bytes] | None) -> Begun:
        if lines is None:
            return Begun(self._dtype, ())
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_no_line_is_blamed_for_what_the_system_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preprocess, "Encoder", Killed)
    (tmp_path / "x.jsonl").write_text('{"text": "1"}\n')
    words = f"--input {tmp_path}/x.jsonl --output-prefix {tmp_path}/out --workers 2"
    words += " --tokenizer-type NullTokenizer --vocab-size 9 --skip-bad-lines"
    assert preprocess.main(words.split()) == 1
    assert "was killed (by the system, for want of memory?)" in capsys.readouterr().err
