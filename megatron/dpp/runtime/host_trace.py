"""Records of a host's training steps, and of the tasks of megatron-core's own schedules.

The static schedules call the module-level ``forward_step`` and ``backward_step`` of
``megatron.core.pipeline_parallel.schedules`` and exchange tensors through
``P2PCommunicator._communicate``. For the length of a ``with`` block :func:`around_steps` wraps the
former two, and :func:`traced` records all three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron.dpp.core import compat
from megatron.dpp.core.compat import default_groups
from megatron.dpp.core.expert_trace import traced_experts
from megatron.dpp.direction import Direction
from megatron.dpp.trace import (
    IdleCause,
    NullRecorder,
    Recorder,
    TraceLayout,
    open_recorder,
    parse_iterations,
)
from megatron.dpp.trace.host import HostTrace
from megatron.dpp.transport.base import ChannelSpec

COMMUNICATE = "pipeline_parallel.p2p_communication:P2PCommunicator._communicate"
SENDS = {"send_next": Direction.FORWARD, "send_prev": Direction.BACKWARD}
RECEIVES = {"recv_prev": Direction.FORWARD, "recv_next": Direction.BACKWARD}
"""The names of ``_communicate`` for its transfers."""


class StepTrace:
    """Records the calls of a schedule that train; each is one iteration of the trace.

    Args:
        settings: what is recorded, and where; None records nothing.
        log: called with a line that names the directory.
    """

    def __init__(self, settings: HostTrace | None, log: Callable[[str], None]) -> None:
        self._settings, self._log = settings, log
        self._recorder: Recorder | None = None
        self._last = -1

    @contextlib.contextmanager
    def step(self, number: int, keywords: dict[str, Any], schedule: str) -> Iterator[Recorder]:
        """Record the block as iteration ``number``, unless it is an evaluation, or a step that was
        recorded before.

        Args:
            keywords: of the schedule's call.
            schedule: as :attr:`TraceLayout.schedule`; the first step's names the directory.
        """
        skipped = keywords.get("forward_only") or number <= self._last
        if self._settings is None or skipped or compat.has_multimodule(keywords) or _is_capturing():
            yield NullRecorder()
            return
        if self._recorder is None:
            self._recorder = self._open(self._settings, keywords, schedule)
        self._last = number
        self._recorder.begin_iteration(number)
        try:
            yield self._recorder
        finally:
            self._recorder.end_iteration()

    @contextlib.contextmanager
    def static_step(self, number: int, keywords: dict[str, Any]) -> Iterator[None]:
        """:meth:`step` around a call of megatron-core's own schedule."""
        model = keywords["model"]
        chunks = model if isinstance(model, list) else [model]
        with self.step(number, keywords, "pp") as recorder, traced(recorder, chunks):
            yield

    def _open(self, settings: HostTrace, keywords: dict[str, Any], schedule: str) -> Recorder:
        model = keywords["model"]
        num_chunks = len(model) if isinstance(model, list) else 1
        layout = _layout(keywords.get("pg_collection") or default_groups(), num_chunks, schedule)
        folder = Path(settings.dir) / layout.directory_name()
        self._log(f"trace: {folder} (megatron-dpp report {folder})")
        on_gpu = torch.cuda.is_available()
        return open_recorder(
            settings.dir,
            rank=torch.distributed.get_rank(),
            layout=layout,
            device=f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu",
            iterations=parse_iterations(settings.iterations) if settings.iterations else None,
            interval=settings.interval,
        )

    def close(self) -> None:
        """End the file; later steps are not recorded."""
        recorder, self._recorder = self._recorder, None
        self._settings = None
        if recorder is not None:
            recorder.close()


def _layout(groups: Any, num_chunks: int, schedule: str) -> TraceLayout:
    """This rank's coordinates in the process groups of a call."""
    context = getattr(groups, "cp", None)
    of = {"pipeline": groups.pp, "tensor": groups.tp, "data": groups.dp_cp}
    if context is not None and context.size() > 1:
        of |= {"data": groups.dp, "context": context}
    places = {axis: torch.distributed.get_rank(group) for axis, group in of.items()}
    sizes = {f"{axis}_size": group.size() for axis, group in of.items()}
    return TraceLayout(**places, **sizes, num_chunks=num_chunks, schedule=schedule)


def _is_capturing() -> bool:
    """True while a CUDA graph of a whole step is captured, in which no event can be timed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Step(NamedTuple):
    """One F or B of a static schedule."""

    kind: str
    chunk: int
    microbatch: int


@contextlib.contextmanager
def around_steps(
    before: Callable[[Step, Any], None], after: Callable[[Step, Any], None]
) -> Iterator[None]:
    """Call ``before(step, received)`` and ``after(step, result)`` around each F and B of one
    schedule call, with the tensors that come from and go to the neighbours.
    """
    made: dict[int, Step] = {}

    def forward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = Step("F", kwargs.get("vp_stage") or 0, kwargs.get("current_microbatch") or 0)
        before(step, _first(kwargs["input_tensor"] if "input_tensor" in kwargs else args[4]))
        result = original(*args, **kwargs)
        output = _first(result[0])
        made[id(output)] = step
        after(step, output)
        return result

    def backward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _, output, gradient = args[:3]
        _, *task = made.pop(id(_first(output)), Step("F", 0, 0))
        step = Step("B", *task)
        before(step, _first(gradient))
        result = original(*args, **kwargs)
        after(step, _first(result))
        return result

    with (
        compat.patched("pipeline_parallel.schedules:forward_step", forward_step),
        compat.patched("pipeline_parallel.schedules:backward_step", backward_step),
    ):
        yield


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors


@contextlib.contextmanager
def traced(recorder: Recorder, chunks: Sequence[torch.nn.Module] = ()) -> Iterator[None]:
    """Record the tasks, waits and messages of one static schedule call, and the experts of these
    model chunks, in the recorder's current iteration; with a
    :class:`~megatron.dpp.trace.NullRecorder` nothing is wrapped.
    """
    if not recorder.enabled:
        yield
        return
    trace = _Trace(recorder)
    with (
        around_steps(trace.before, trace.after),
        compat.patched(COMMUNICATE, trace.communicate),
        traced_experts(chunks, recorder),
    ):
        yield


class _Trace:
    """The record of one schedule call.

    Tensors are recognised by identity: a result of a step is what is sent, and a received tensor is
    what a later step gets. So a message's chunk and microbatch are known when it is used, and its
    arrival is recorded then, with the time at which the wait for it ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: dict[int, Step] = {}
        self._received: dict[int, tuple[torch.Tensor, int, Any]] = {}
        """Tensor, sender and arrival of each message that no step has used yet."""
        self._tasks_run = 0

    def before(self, step: Step, received: Any) -> None:
        """Record the arrival of a step's input, and its beginning."""
        tensor, peer, arrived = self._received.pop(id(received), (None, 0, None))
        if tensor is not None:
            way = Direction.FORWARD if step.kind == "F" else Direction.BACKWARD
            channel = ChannelSpec(peer, torch.distributed.get_rank(), step.chunk, way, 0)
            arrival = SimpleNamespace(
                tensor=tensor, arrived_ns=arrived, sent_ns=None,
                iteration=self._recorder.iteration, microbatch=step.microbatch,
            )  # fmt: skip
            self._recorder.taken(channel, arrival)
        self._recorder.begin_task(*step)

    def after(self, step: Step, result: Any) -> None:
        """Record a step's end."""
        self._recorder.end_task()
        self._tasks_run += 1
        if isinstance(result, torch.Tensor):
            self._made[id(result)] = step

    def communicate(self, original: Callable[..., Any], communicator: Any, **kwargs: Any) -> Any:
        """``P2PCommunicator._communicate`` with its sends and receives recorded."""
        for name, way in SENDS.items():
            self._sent(kwargs[f"tensor_{name}"], communicator, way)
        waits = kwargs.get("wait_on_reqs", True)
        start = self._recorder.mark() if waits else None
        previous, following, handles = original(communicator, **kwargs)
        tensors = {"recv_prev": previous, "recv_next": following}
        if waits:
            received = {way: tensors[name] for name, way in RECEIVES.items() if kwargs[name]}
            self._waited(start, received, communicator)
        else:
            for name in RECEIVES.keys() & handles.keys():
                arriving = {RECEIVES[name]: tensors[name]}
                wait = partial(self._timed, handles[name].wait, arriving, communicator)
                handles[name] = SimpleNamespace(wait=wait)
        return previous, following, handles

    def _timed(
        self, wait: Callable[[], Any], received: dict[Direction, Any], communicator: Any
    ) -> Any:
        start = self._recorder.mark()
        result = wait()
        self._waited(start, received, communicator)
        return result

    def _waited(self, start: Any, received: dict[Direction, Any], communicator: Any) -> None:
        """Record a wait that ends now, and keep what it received."""
        end, cause, detail = self._recorder.mark(), IdleCause.SEND, ""
        if received:
            cause = IdleCause.MESSAGE if self._tasks_run else IdleCause.WARM_UP
            detail = next(iter(received)).name.lower()
        self._recorder.gap(start, end, cause, detail)
        for way, tensor in received.items():
            forward = way is Direction.FORWARD
            peer = communicator.prev_rank if forward else communicator.next_rank
            self._received[id(tensor)] = (tensor, peer or 0, end)

    def _sent(self, tensor: Any, communicator: Any, way: Direction) -> None:
        step = self._made.get(id(tensor))
        if tensor is None or step is None:
            return
        group, forward = communicator.pp_group, way is Direction.FORWARD
        wraps = group.rank() == (group.size() - 1 if forward else 0)
        chunk = step.chunk + (1 if forward else -1) * wraps
        peer = communicator.next_rank if forward else communicator.prev_rank
        channel = ChannelSpec(torch.distributed.get_rank(), peer or 0, chunk, way, 0)
        self._recorder.put(channel, step.microbatch, tensor.nbytes, "p2p")
