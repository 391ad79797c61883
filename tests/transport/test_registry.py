"""The registry of transport kinds is the only place that knows their names."""

from __future__ import annotations

import ast
import subprocess
import sys
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


ALONE = """
import sys
from torch.distributed import HashStore
REFUSED = ("megatron.core", "megatron.training", "psutil", "transformer_engine", "transformers")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(REFUSED):
            raise ImportError(name + " is not needed")
sys.meta_path.insert(0, Refuse())
import threading, torch
from megatron.dpp.transport import ChannelSpec, Direction, open_transport
store, spec = HashStore(), ChannelSpec(0, 1, 0, Direction.FORWARD, 64)
def run(rank, kind):
    with open_transport([spec], rank=rank, store=store, kind=kind) as end:
        if rank == 0:
            end.put(0, torch.ones(3), iteration=0, microbatch=7)
            end.flush(30.0)
            return
        while not end.poll()[0]:
            end.wait(30.0)
        print(kind, end.take(0).microbatch, end.links()[0].kind)
for kind in ("shm", "tcp"):
    ranks = [threading.Thread(target=run, args=(rank, kind)) for rank in range(2)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
"""


def test_links_need_pytorch_and_nothing_of_megatron() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=PACKAGE.parents[1], capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["shm 7 shm", "tcp 7 tcp"], done.stderr
