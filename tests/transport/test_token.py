"""The job's token: who can read it, and where it is named."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, SetupError
from megatron.dpp.train import torchrun
from megatron.dpp.transport import TransportOptions, open_transport
from megatron.dpp.transport.rendezvous import read_token
from tests.transport.kinds import PATIENCE, of_rank, opened, pair

TOKEN_KEY = "dpp/main/1/token"


def open_two(store: Any, **options: Any) -> list[Any]:
    found: list[Any] = [None, None]

    def open_one(rank: int) -> None:
        settings = TransportOptions(setup_timeout=PATIENCE, **options)
        mine = of_rank(pair(), rank)
        found[rank] = open_transport(mine, rank=rank, store=store, kind="shm", options=settings)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    for transport in found:
        transport.close()
    return found


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("name", [b"plain", b"not \xff UTF-8, 50%41"])
def test_on_one_node_the_store_does_not_hold_the_token(
    name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    store = HashStore()
    open_two(store)
    assert store.get(TOKEN_KEY).isascii() and b"/dpp-token-" in store.get(TOKEN_KEY)
    assert not list(folder.iterdir())  # the last rank that read it removed it


@pytest.mark.usefixtures("one_node")
def test_a_temporary_directory_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(SetupError, match=r"rank 0: .*\(TMPDIR\): .*none/dpp-token-"):
        open_transport(of_rank(pair(), 0), rank=0, store=HashStore(), kind="shm")


def test_a_token_file_with_an_impossible_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="token file a\0b: embedded null byte"):
        read_token(Path("a\0b"))


@pytest.mark.parametrize("way", ["option", "environment"])
def test_a_token_file_keeps_the_token_out_of_the_store(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    if way == "environment":
        monkeypatch.setenv("DPP_TOKEN_FILE", str(secret))
    store = HashStore()
    open_two(store, **({"token_file": str(secret)} if way == "option" else {}))
    assert not store.check([TOKEN_KEY])
    assert DppConfig(token_file=str(secret)).token_file == str(secret)


@pytest.mark.parametrize("other", [-1, 1])
def test_a_token_file_of_another_user_is_refused(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + other)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        read_token(secret)


def test_the_store_of_one_node_listens_on_the_loopback_address() -> None:
    store = torchrun._LocalStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    assert store.host == "127.0.0.1"
    listening = f":{store.port:04X}"
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
    rows += [line.split() for line in Path("/proc/self/net/tcp6").read_text().splitlines()]
    found = [row[1] for row in rows if row[1].endswith(listening) and row[3] == "0A"]
    assert found == [f"0100007F{listening}"]
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_keep_alive_follows_the_peer_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.dpp.transport.rendezvous import Rendezvous

    found: dict[str, tuple[int, ...]] = {}
    original = Rendezvous.connect

    def connect(self: Rendezvous, wanted: Any) -> Any:
        made = original(self, wanted)
        for (_, purpose), connection in made.items():
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found[purpose] = tuple(
                connection.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in names
            )
        return made

    monkeypatch.setattr(Rendezvous, "connect", connect)
    with opened("tcp", pair(), peer_timeout=30.0):
        pass
    assert found["control"] == (3, 3, 11, 36_000)
    assert found["data 0"] == (3, 3, 11, 0)
