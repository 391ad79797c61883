"""Settings in texts; exit statuses and messages of programs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.command_line import in_flags, renamed
from megatron.dpp.errors import (
    ConfigError,
    DppError,
    PeerDead,
    Setting,
    Text,
    exit_with,
    from_json,
    one_line,
    said,
    setting,
    to_json,
)

ROOT = Path(__file__).resolve().parents[1]


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    """``| head`` ends it without a traceback."""
    program = subprocess.Popen(
        [sys.executable, "-m", "megatron.dpp", "sim", "--pp", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == ""
    assert program.wait(120) == 1
    program.stderr.close()


SLOTS, ONLY = setting("slots", 3), setting("only", owner="HostTrace")
WORDS = f"{SLOTS}, {ONLY}: no"


def test_a_text_names_settings_as_the_program_spells_them() -> None:
    """The words are Python's; an error of an error, a text of a text keep what they name."""
    inner = ConfigError(WORDS, SLOTS, ONLY)
    assert inner.settings == (Setting("DppConfig", "slots", 3), Setting("HostTrace", "only"))
    for text in (
        inner, Text(WORDS, SLOTS, ONLY), Text(WORDS, inner), PeerDead(Text(WORDS, inner)),
        one_line(inner), from_json(to_json(inner)), pickle.loads(pickle.dumps(inner)),
        pickle.loads(pickle.dumps(Text(WORDS, inner))), copy.copy(inner),
    ):  # fmt: skip
        assert str(text) == "DppConfig(slots=3), HostTrace(only=...): no"
        assert said(text, in_flags) == "--dpp-slots 3, --dpp-trace-only: no"
        assert said(text, renamed({"slots": "DPP_SLOTS"}, "=")) == (
            "DPP_SLOTS=3, --dpp-trace-only: no"
        )
        assert repr(text).strip("'").startswith((type(text).__name__, "DppConfig"))
    assert said(WORDS, in_flags) == WORDS  # a plain text names none
    assert repr(DppError(WORDS, SLOTS)) == f"DppError({WORDS!r})"


@pytest.mark.parametrize(
    ("value", "in_python", "flag"),
    [
        ("a b", "'a b'", "--dpp-record a b"),
        (1, "1", "--dpp-record 1"),
        (True, "True", "--dpp-record"),
        (False, "False", "--no-dpp-record"),
        (float("inf"), "inf", "--dpp-record inf"),
        (None, "None", "--dpp-record None"),
        (Path("a"), "'a'", "--dpp-record a"),
    ],
)
def test_a_value_is_spelled_as_it_was_given(value: object, in_python: str, flag: str) -> None:
    record = setting("record", value)
    text = from_json(to_json(Text(record, record)))
    assert (text, said(text, in_flags)) == (f"DppConfig(record={in_python})", flag)


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '["a", 1]', '["a", [[1]]]', '{"a": 1}', "[" * 9999]
)
def test_what_a_peer_says_is_shown_though_it_is_no_json(text: str) -> None:
    assert from_json(text) == text


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        exit_with(interrupted)
    assert ended.value.code == 130


def test_a_command_whose_output_is_full_says_so() -> None:
    """It said "[Errno 28] No space left on device", of which nobody knew where."""
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" -m megatron.dpp sim --pp 2 >/dev/full', sys.executable],
        stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    said = "megatron-dpp: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
