"""The job's token: who can read it, and where it is named."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.torch_version import TorchVersion

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, ProtocolError, SetupError, TransportError
from megatron.dpp.transport import TransportOptions, open_transport
from megatron.dpp.transport.job_token import SecretFile, read_token
from megatron.dpp.transport.rendezvous import Rendezvous
from megatron.dpp_train.launch import torchrun
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


def until_empty(folder: Path) -> None:
    """Returns once the rank that made a token's file has deleted it."""
    deadline = time.monotonic() + PATIENCE
    while list(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("DPP_TOKEN_FILE", raising=False)


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
    assert store.get(TOKEN_KEY).startswith(b"dpp-token-")
    until_empty(folder)


@pytest.mark.usefixtures("one_node")
def test_a_temporary_directory_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(SetupError, match=r"rank 0: .*\(TMPDIR\): .*none/dpp-token-"):
        open_transport(of_rank(pair(), 0), rank=0, store=HashStore(), kind="shm")


# A store into which others write ------------------------------------------------------------------


def key_file(folder: Path, name: str = "id_ed25519") -> Path:
    """A file of ours that is no token, as private and as long as one."""
    made = folder / name
    made.write_text("PRIVATE KEY" * 10)
    made.chmod(0o600)
    return made


def meet_over(named: str) -> list[BaseException]:
    """Two ranks whose store names a file in the place of the token's; what each raises."""
    store, found = HashStore(), []
    store.add("dpp/main/1/token/claimed", 1)
    store.set(TOKEN_KEY, named)
    for rank in range(2):
        with pytest.raises(TransportError) as caught:
            Rendezvous(store, rank, TransportOptions(setup_timeout=0.5)).close()
        found.append(caught.value)
    return found


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("way", ["{key}", "../{name}", "dpp-token-/../{name}", "dpp-token-\n", ""])
def test_no_path_from_the_store_is_opened_or_deleted(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, temporary = key_file(tmp_path), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for error in meet_over(way.format(key=key, name=key.name)):
        assert type(error) is ProtocolError and "another process writes into it" in str(error)
    assert key.read_text().startswith("PRIVATE KEY")


def named_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def link_to_key(path: Path) -> None:
    path.symlink_to(key_file(path.parent))


def readable(path: Path) -> None:
    key_file(path.parent, path.name).chmod(0o640)


def huge(path: Path) -> None:
    os.truncate(key_file(path.parent, path.name), 1 << 40)


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("make", [named_pipe, link_to_key, readable, huge, Path.mkdir, Path.exists])
def test_a_file_that_is_no_token_is_refused_and_stays(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make(tmp_path / "dpp-token-abc")
    before = sorted(tmp_path.iterdir())
    for error in meet_over("dpp-token-abc"):
        assert type(error) is SetupError and "(TMPDIR)" in str(error)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("key", ["opened/0", "1/token/claimed", "1/token", "1/token/read"])
def test_broken_entries_of_the_store_are_typed_errors(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = HashStore()
    store.set(f"dpp/main/{key}", b"\xff\xfe")
    if key == "1/token":
        store.add("dpp/main/1/token/claimed", 1)
    with pytest.raises(TransportError, match="rank 0"):
        Rendezvous(store, 0, TransportOptions(setup_timeout=0.5)).close()


def test_a_named_pipe_does_not_hold_a_rank_up(tmp_path: Path) -> None:
    named_pipe(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        read_token(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(key_file(tmp_path))
    assert read_token(tmp_path / "link").startswith(b"PRIVATE KEY")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_only_the_process_that_made_a_token_deletes_it(temporary: Path) -> None:
    made = SecretFile(0)
    if (child := os.fork()) == 0:
        made.delete()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (temporary / made.name).exists()
    made.delete()
    made.delete()
    assert not list(temporary.iterdir())


def test_a_token_stays_while_a_rank_may_read_it(temporary: Path) -> None:
    looks = iter([False, True])
    made = SecretFile(0)
    made.delete_when(lambda: next(looks), 0.0)
    assert (temporary / made.name).exists() and next(looks) is False
    made.delete_when(lambda: next(looks), PATIENCE)
    until_empty(temporary)


def test_tokens_of_killed_processes_go_with_the_next_start(temporary: Path) -> None:
    old = time.time() - 7200.0
    running = SecretFile(0)
    files = {name: key_file(temporary, name) for name in ("dpp-token-old", "dpp-token-new", "key")}
    for path in (files["dpp-token-old"], files["key"], temporary / running.name):
        os.utime(path, (old, old))
    (temporary / "dpp-token-link").symlink_to(files["key"])
    os.utime(temporary / "dpp-token-link", (old, old), follow_symlinks=False)
    last = SecretFile(1)
    left = {path.name for path in temporary.iterdir()}
    assert left == {"dpp-token-new", "dpp-token-link", "key", running.name, last.name}
    for made in (running, last):
        made.delete()


def test_a_token_file_with_an_impossible_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"token file a\x00b: .*embedded null"):
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


def test_two_jobs_of_one_token_file_listen_side_by_side(tmp_path: Path) -> None:
    """Both have ranks of the same numbers on this host."""
    secret = tmp_path / "token"
    secret.write_text("a token of a user's own")
    secret.chmod(0o600)
    options = TransportOptions(setup_timeout=PATIENCE, token_file=str(secret))
    with Rendezvous(HashStore(), 3, options) as one, Rendezvous(HashStore(), 3, options) as other:
        assert one.unix_address != other.unix_address


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
    store = torchrun.LocalStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    assert store.host == "127.0.0.1"
    listening = f":{store.port:04X}"
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
    rows += [line.split() for line in Path("/proc/self/net/tcp6").read_text().splitlines()]
    found = [row[1] for row in rows if row[1].endswith(listening) and row[3] == "0A"]
    assert found == [f"0100007F{listening}"]
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("version", "libuv"), [("2.6.0", False), ("2.7.1", False), ("2.8.0", True)]
)
def test_a_pytorch_whose_libuv_takes_no_socket_has_the_older_store(
    version: str, libuv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if libuv and torch.__version__ < version:
        pytest.skip("this PyTorch is older")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    store = torchrun.LocalStore("localhost", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert (store.get("key"), store.libuvBackend) == (b"value", libuv)


def test_keep_alive_follows_the_peer_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends: either host may be lost."""
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    original = Rendezvous.connect

    def connect(self: Rendezvous, wanted: Any) -> Any:
        made = original(self, wanted)
        for (_, purpose), connection in made.items():
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found[self._rank, purpose] = tuple(
                connection.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in names
            )
        return made

    monkeypatch.setattr(Rendezvous, "connect", connect)
    with opened("tcp", pair(), peer_timeout=30.0):
        pass
    for rank in range(2):
        assert found[rank, "control"] == (3, 3, 11, 36_000)
        assert found[rank, "data 0"] == (3, 3, 11, 0)
