"""Finds the cause of a failed collective.

gloo and NCCL report a broken connection, not the rank that died. Our links name that rank, but join
the ranks of one pipeline only. So the rank that meets a cause writes it into the job's store, and a
rank of another data-parallel replica reads it there when its collective fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron.dpp.errors import PeerDead, Text, TransportError, from_json, to_json
from megatron.dpp.processes import stopped_of_job
from megatron.dpp.transport.base import Transport

_KEY = "dpp/failure"
REPORT_SECONDS = 0.5
ASK_SECONDS = 2.0
"""Short, as the store may be lost, too."""
_NAP_SECONDS = 0.02
_LONGEST = 600
"""Characters of an error's text that are quoted."""
_SAID_BY = "(says rank"
_MISSING = "; the oldest missing message here"
"""What the links write behind a cause."""


def explained(error: BaseException, transport: Transport | None) -> BaseException:
    """The error that explains ``error``: a link's failure or, for a collective's error, the cause
    that another rank has reported; ``error`` itself if nothing is known.
    """
    if not isinstance(error, RuntimeError):
        return error
    met = f"; met here as {type(error).__name__}: {_quoted(error)}"
    if transport is not None:
        try:
            transport.raise_failure()
        except TransportError as failure:
            found = type(failure)(f"{failure}{met}", failure)
            found.cause = failure.cause or Text(failure, failure)
            return found
    if not _is_of_collective(error):
        return error
    if told := ask():
        return PeerDead(f"rank {dist.get_rank()}: {told}{met}", told)
    halted = stopped_of_job()
    return TransportError(f"rank {dist.get_rank()}: {halted}{met}") if halted else error


def leave(error: BaseException, transport: Transport | None) -> BaseException:
    """Tell the other ranks why this one ends; returns what explains ``error``."""
    cause = explained(error, transport)
    if transport is not None:
        transport.abort(reason(cause))
    report(cause)
    return cause


def report(error: BaseException) -> None:
    """Write ``error`` into the store, unless a cause is there already. A collective's error is no
    cause, nor is one that another rank has reported.
    """
    if not dist.is_initialized() or _is_of_collective(error) or _SAID_BY in str(error):
        return
    rank, text = dist.get_rank(), reason(error)
    if isinstance(error, TransportError):
        text = Text(f"{text} {_SAID_BY} {rank})", text)
    else:
        text = Text(f"rank {rank} gave up: {text}", text)
    store = dist.distributed_c10d._get_default_store()
    within(REPORT_SECONDS, lambda: store.compare_set(_KEY, "", to_json(text)))


def reason(error: BaseException) -> Text:
    """The text by which other ranks learn why this one ends; a link's failure is cut down to its
    cause.
    """
    if not isinstance(error, TransportError):
        return Text(f"{type(error).__name__}: {_quoted(error)}", error)
    text = (error.cause or str(error)).partition(_MISSING)[0]
    _, _, other = text.partition(": ")
    return Text(other if text.startswith("rank ") and other.startswith("rank ") else text, error)


def ask() -> Text | None:
    """The cause that a rank has reported, waited for briefly."""
    if not dist.is_initialized():
        return None
    store, found = dist.distributed_c10d._get_default_store(), []
    deadline = time.monotonic() + ASK_SECONDS

    def look() -> None:
        while not store.check([_KEY]) and time.monotonic() < deadline:
            time.sleep(_NAP_SECONDS)
        if store.check([_KEY]):
            found.append(from_json(store.get(_KEY).decode()))

    within(ASK_SECONDS, look)
    return found[0] if found else None


def _is_of_collective(error: BaseException) -> bool:
    """True for errors of NCCL, and for RuntimeErrors that name gloo's source file."""
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return of_gloo or isinstance(error, dist.DistError)


def within(seconds: float, function: Callable[[], object]) -> None:
    """Run a request to the store, which may fail or hang with the host that was lost."""

    def attempt() -> None:
        try:
            function()
        except RuntimeError:  # the store's own
            return

    thread = threading.Thread(target=attempt, name="dpp-failure", daemon=True)
    thread.start()
    thread.join(seconds)


def _quoted(error: BaseException) -> str:
    """The first line of a text, which may be long."""
    return (str(error).splitlines() or [""])[0][:_LONGEST]
