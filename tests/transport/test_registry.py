"""The registry of transport kinds is the only place that knows their names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.distributed import HashStore

import megatron.dpp
from megatron.dpp.config import KIND_PACKAGES, TRANSPORT_KINDS
from megatron.dpp.errors import ConfigError
from megatron.dpp.transport import open_transport
from megatron.dpp.transport.kinds import AUTO, find, kinds_of_boards, kinds_of_links
from tests.transport.kinds import KINDS, of_rank, pair

PACKAGE = Path(megatron.dpp.__file__).parent
NAMES = [name for name in TRANSPORT_KINDS if name != AUTO]


def test_every_kind_is_registered_and_goes_through_the_conformance_suite() -> None:
    assert {*NAMES, "fake"} == set(KINDS)
    for name in NAMES:
        kind = find(name)
        assert kind.name == name
        assert bool(kind.open) != bool(kind.join and kind.obstacle and kind.reason)


def test_kinds_are_tried_in_order_of_preference() -> None:
    ours = ["cuda_ipc", "staged", "shm", "rdma", "tcp"]
    assert [kind.name for kind in kinds_of_links() if kind.name in ours] == ours
    assert [kind.name for kind in kinds_of_links("tcp")] == ["tcp"]
    assert [kind.name for kind in kinds_of_boards()] == ["shm", "tcp"]


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"transport='pigeon'\): expected one of auto, .*tcp"):
        open_transport(of_rank(pair(), 0), rank=0, store=HashStore(), kind="pigeon")


def test_no_other_code_names_a_kind() -> None:
    """But ``config.py`` the packages that kinds need, which have their names."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent == PACKAGE / "transport" / "kinds":
            continue
        elsewhere = {*NAMES} - ({*KIND_PACKAGES} if path == PACKAGE / "config.py" else set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in elsewhere:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}")
    assert not found
