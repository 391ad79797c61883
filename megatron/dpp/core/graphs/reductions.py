"""Gradient reductions that overlap a replayed backward.

DistributedDataParallel reduces a bucket group as soon as its last gradient is there. A replay
finishes all gradients at once, so nothing would overlap. A captured backward therefore records an
event where the gradients of a bucket group are complete, and a stream of their own starts the
reductions behind these events (decision 0015 in docs/decisions/gpu.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Additions:
    """The gradients that one captured backward adds, by bucket group in order of completion.

    Args:
        group_of: the bucket group of each of the block's parameters; empty where DDP does not
            reduce from within a backward.
        sizes: how many parameters of the block each bucket group has.
        marks: record an event where a group is complete.
    """

    def __init__(
        self, group_of: dict[torch.nn.Parameter, Any], sizes: Counter[Any], *, marks: bool
    ) -> None:
        self._group_of, self._sizes, self._marks = group_of, sizes, marks
        self.parameters: dict[Any, list[torch.nn.Parameter]] = {}
        self._events: defaultdict[Any, list[Any]] = defaultdict(list)

    def event(self, group: Any) -> Any:
        """The event of a group's completion in a replay; None if none is recorded."""
        return self._events[group][-1] if self._events[group] else None

    def add(self, parameter: torch.nn.Parameter) -> None:
        """Note a gradient that was added on the current, capturing stream."""
        if parameter not in self._group_of:
            return
        group = self._group_of[parameter]
        self.parameters[group] = [*self.parameters.pop(group, ()), parameter]
        if self._marks and len(set(self.parameters[group])) == self._sizes[group]:
            self._events[group].append(_recorded())  # one more if a parameter comes again


class Reductions:
    """The reductions that one chunk's replayed backwards start.

    Args:
        chunk: the model chunk; of one that DDP does not wrap, or reduces at the end of a step,
            nothing is reduced here.
        parameters: those of its block that are trained.
    """

    def __init__(self, chunk: Any, parameters: list[torch.nn.Parameter]) -> None:
        options: Any = getattr(chunk, "ddp_config", None)
        overlaps: bool = options is not None and options.overlap_grad_reduce
        self._chunk = chunk
        self._groups: list[Any] = chunk.bucket_groups if overlaps else []
        self._group_of = {p: chunk.param_to_bucket_group[p] for p in parameters} if overlaps else {}
        self._sizes = Counter(self._group_of.values())
        # Between several optimizer instances DDP itself waits for all that the default stream has.
        self._marks = overlaps and options.num_distributed_optimizer_instances == 1
        self._stream: torch.cuda.Stream | None = None

    def additions(self) -> Additions:
        """A new record for one capture of a backward."""
        return Additions(self._group_of, self._sizes, marks=self._marks)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Keep gradients that are added in this block from starting their reduction."""
        was = [group.is_last_microbatch for group in self._groups]
        for group in self._groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group, last in zip(self._groups, was, strict=True):
                group.is_last_microbatch = last

    def start(self, added: Additions) -> None:
        """Reduce what a launched replay adds, if it is the last microbatch's."""
        if not any(group.is_last_microbatch for group in self._groups):
            return
        for group, parameters in added.parameters.items():
            with self._behind(added.event(group)):
                for parameter in parameters:
                    group.register_grad_ready(parameter, self._chunk.force_all_reduce)
        if self._stream is not None:  # DDP scales gradients there
            torch.cuda.current_stream().wait_stream(self._stream)

    def _behind(self, event: Any) -> AbstractContextManager[Any]:
        """Queue work behind this event, or at the end of the replay if there is none."""
        if event is None:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)


def _recorded() -> Any:
    """An event that every replay records here; None without a GPU, or if this PyTorch has no
    events that can be waited for outside of a graph.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        event: Any = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
    except TypeError:
        return None
    event.record()
    return event
