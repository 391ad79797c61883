"""docs/names.md: what it names on the right exists."""

from __future__ import annotations

import re

import pytest

from megatron.dpp.__main__ import COMMANDS
from megatron.dpp_train.options.environment import VARIABLES
from tests.conftest import REPOSITORY
from tests.test_docs_commands import known_flags

PAGE = (REPOSITORY / "docs" / "names.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| ")]
TARGETS = sorted({name for _, here in ROWS for name in re.findall(r"`([^`]+)`", here)})
MADE_BY_RUNS = {"runs/latest/traces", "benchmark", "iter_0001000", "runs/latest/train.log"}
FOLDERS = {"datasets_gpt", "datasets_bert"}
SAID_BY_A_SHELL = {"--workers: command not found"}
OF_TORCHRUN = {"--nproc_per_node"}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    return known_flags()


@pytest.mark.parametrize("target", TARGETS)
def test_the_target_exists(target: str, flags: set[str]) -> None:
    if target.startswith("megatron-dpp "):
        name, *rest = target.split()[1:]
        assert name in COMMANDS and {word for word in rest if word.startswith("--")} <= flags
    elif target.startswith("--") and target not in SAID_BY_A_SHELL:
        assert target.split()[0] in flags | OF_TORCHRUN
    elif target.isupper():
        assert target in VARIABLES
    else:
        assert target in MADE_BY_RUNS | FOLDERS | SAID_BY_A_SHELL or (REPOSITORY / target).is_file()


def test_every_row_has_a_target_or_says_that_there_is_none() -> None:
    assert len(ROWS) > 25
    empty = [earlier for earlier, here in ROWS[1:] if "`" not in here and "accepted" not in here]
    assert empty == [
        each
        for each in empty
        if each.strip() == "earlier" or "distributed_fbd" in each or "T5" in each
    ]
