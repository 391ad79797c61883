"""What a rank says of a peer whose own set-up fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import PeerDead, SetupError, TransportError
from megatron.dpp.transport import TransportOptions, open_transport, opening
from tests.transport.kinds import PATIENCE, of_rank, pair, prepared

REASON = "123 bytes of shared memory: Cannot allocate memory"


def fail_on_rank_1(patch: pytest.MonkeyPatch, place: Any, step: str) -> None:
    original = getattr(place, step)

    def fail(self: Any, *rest: Any) -> Any:
        if self._rank == 1:
            raise SetupError(REASON)
        return original(self, *rest)

    patch.setattr(place, step, fail)


def error_of_rank_0(kind: str) -> TransportError:
    """Of opening and of waiting for a message; rank 1 cannot open."""
    store, errors = HashStore(), {}

    def run(rank: int) -> None:
        options = TransportOptions(setup_timeout=PATIENCE)
        try:
            mine = of_rank(pair(), rank)
            with open_transport(mine, rank=rank, store=store, kind=kind, options=options) as end:
                deadline = time.monotonic() + PATIENCE
                while time.monotonic() < deadline:
                    end.poll()
                    end.wait(0.2)
        except TransportError as error:
            errors[rank] = error

    with prepared(kind):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
    assert str(errors[1]) == REASON
    return errors[0]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_peer_that_fails_in_its_last_step_has_not_left_in_good_order(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on_rank_1(monkeypatch, opening._Opening, "_join_rdma")
    error = error_of_rank_0(kind)
    assert type(error) is PeerDead
    assert f"rank 0: rank 1 gave up: SetupError: {REASON}" in str(error)
