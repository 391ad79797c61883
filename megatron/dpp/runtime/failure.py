"""Whose fault a failed collective is.

gloo and NCCL say that a connection broke, not which rank has died, and our links, which do, join
the ranks of one pipeline only. So the rank that meets a cause writes it into the job's store, and a
rank of another data-parallel replica whose gradient reduction, loss or norm fails for it reads it
there. ``Replacement`` is the only caller, when an error ends a schedule.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron.dpp.errors import PeerDead, TransportError
from megatron.dpp.transport.base import Transport

_KEY = "dpp/failure"
_TELL_SECONDS = 0.5
_ASK_SECONDS = 2.0
"""The other ranks see the death about when this one does, and the store may be lost as well."""
_NAP_SECONDS = 0.02
_LONGEST = 200
"""Characters of an error's text that are quoted."""
_HEARSAY = "(says rank"
_MET_HERE, _MISSING = "; met here as ", "; the oldest missing message here"
"""What follows the cause in a text; the links append the latter."""


def explained(error: BaseException, transport: Transport | None) -> BaseException:
    """The error that explains ``error``: a link's failure, or, of a collective, what another rank
    has told of; ``error`` itself where nothing is known.
    """
    if not isinstance(error, RuntimeError):
        return error
    met = f"{_MET_HERE}{type(error).__name__}: {_quoted(error)}"
    if transport is not None:
        try:
            transport.raise_failure()
        except TransportError as failure:
            return type(failure)(f"{failure}{met}")
    told = _ask() if _of_a_collective(error) else None
    return PeerDead(f"rank {dist.get_rank()}: {told}{met}") if told else error


def tell(error: BaseException) -> None:
    """Write into the store that this rank ends with ``error``; what was told first stays. A
    collective's error is no cause, and what another rank says is there already.
    """
    if not dist.is_initialized() or _of_a_collective(error) or _HEARSAY in str(error):
        return
    rank, text = dist.get_rank(), reason(error)
    if isinstance(error, TransportError):
        text += f" {_HEARSAY} {rank})"
    else:
        text = f"rank {rank} gave up: {text}"
    store = dist.distributed_c10d._get_default_store()
    _within(_TELL_SECONDS, lambda: store.compare_set(_KEY, "", text))


def reason(error: BaseException) -> str:
    """Why a rank ends, for the others: of a failed link what had happened, without who tells it and
    what was missing there.
    """
    if not isinstance(error, TransportError):
        return f"{type(error).__name__}: {_quoted(error)}"
    text = str(error)
    for end in (_MET_HERE, _MISSING):
        text = text.partition(end)[0]
    return re.sub(r"^rank \d+: (?=rank )", "", text)


def _ask() -> str | None:
    """What a rank has told, if one does soon."""
    if not dist.is_initialized():
        return None
    store, found = dist.distributed_c10d._get_default_store(), []
    deadline = time.monotonic() + _ASK_SECONDS

    def look() -> None:
        while not store.check([_KEY]) and time.monotonic() < deadline:
            time.sleep(_NAP_SECONDS)
        if store.check([_KEY]):
            found.append(store.get(_KEY).decode())

    _within(_ASK_SECONDS, look)
    return found[0] if found else None


def _of_a_collective(error: BaseException) -> bool:
    """gloo's errors have PyTorch's plainest type, and gloo's source file in their text."""
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return of_gloo or isinstance(error, dist.DistError)


def _within(seconds: float, function: Callable[[], object]) -> None:
    """Run what may fail, or never end: the store's host may be what was lost."""

    def attempt() -> None:
        try:
            function()
        except RuntimeError:  # the store's own
            return

    thread = threading.Thread(target=attempt, name="dpp-blame", daemon=True)
    thread.start()
    thread.join(seconds)


def _quoted(error: BaseException) -> str:
    """The first line, of gloo's without its place in the source and its advice."""
    line = (str(error).splitlines() or [""])[0]
    line = re.sub(r"^\[\S*gloo\S*\] |\. This is typically caused by.*", "", line)
    return line[:_LONGEST]
