"""Two ranks of two hosts that keep sending while the wire between them is gone."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from typing import Any

import torch

from tests.netns import Hosts
from tests.transport import kinds
from tests.transport.kinds import forked, open_from_file, pair

MIB = 1 << 20
MESSAGES = 100


def survive(kind: str, hosts: Hosts, seconds: float, folder: Path) -> None:
    """Both ranks send numbered messages of many sizes before, in and after the blackout."""

    def body(rank: int, path: str, results: Any) -> None:
        faulthandler.dump_traceback_later(seconds + 2 * kinds.PATIENCE, exit=True)
        hosts.enter(rank)
        own = hosts.addresses[rank]
        with open_from_file(kind, pair(MIB)[1:], rank, path, node_ips=own) as transport:
            exchange(transport, lambda: results.put(("flows", rank, 0.0)))
            transport.flush(kinds.PATIENCE)
            results.put(("whole", rank, time.monotonic()))

    with forked(2, body, folder) as (_, results):
        reports = [results.get(timeout=kinds.PATIENCE) for _ in range(2)]
        assert [report[0] for report in reports] == ["flows", "flows"]
        hosts.cut()
        time.sleep(seconds)
        hosts.restore()
        restored = time.monotonic()
        reports = [results.get(timeout=seconds + kinds.PATIENCE) for _ in range(2)]
    late = max(report[2] for report in reports) - restored
    print(f"whole {late:.2f} s after the blackout of {seconds:g} s")
    assert [report[0] for report in reports] == ["whole", "whole"]
    assert late > 0.0  # there was something to come


def exchange(transport: Any, flows: Any) -> None:
    """Send and take all messages of this rank; calls ``flows`` when some have arrived."""
    sent = taken = 0
    while sent < MESSAGES or taken < MESSAGES:
        if sent < MESSAGES and transport.pending() < 2 and sent <= taken + 5:
            transport.put(0, _message(sent), iteration=0, microbatch=sent)
            sent += 1
        if transport.poll()[0] == taken:
            transport.wait(0.05)
            continue
        message = transport.take(0)
        assert message.microbatch == taken
        assert torch.equal(message.tensor, _message(taken))
        taken += 1
        if taken == 5:
            flows()
        time.sleep(0.01)  # so that the blackout comes before the last message


def _message(number: int) -> torch.Tensor:
    return torch.full((number * 79_193 % MIB,), number, dtype=torch.uint8)
