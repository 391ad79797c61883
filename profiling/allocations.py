"""Records of the caching allocator, and what they say of a rank's memory.

A record is a list of events in order: blocks that PyTorch takes and gives back, memory that the
allocator maps, and the begin and end of tasks. :func:`analyse` says where memory was lost at the
peak: which tensors live, and what is reserved between them although nobody uses it.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

MIB = 1 << 20
SMALL = MIB
"""Requests up to this many bytes come from pools of their own."""
ALLOC, FREE, DONE, MAP, UNMAP, BEGIN, END = range(7)
"""Kinds of events: a block is taken, given back by its owner, ready for another; memory is mapped,
unmapped; a task begins, ends.
"""

_MARK = (7, 9)
"""Bytes of the tiny blocks that mark the begin and the end of a task in a record."""

Event = tuple[int, int, int]
"""Kind, address (or the number of a task), bytes."""


def task_name(task: Sequence[Any]) -> str:
    """``F0 3``: kind, chunk, microbatch."""
    kind, chunk, microbatch = task[:3]
    return f"{kind}{chunk} {microbatch}"


class Heap:
    """The address space of one device as a record changes it.

    Args:
        blocks: ``(address, bytes)`` of the blocks that live at the start.
        mapped: ``(address, bytes)`` of the memory that is reserved at the start.
        tasks: ``(kind, chunk, microbatch)`` by number.
    """

    def __init__(
        self,
        blocks: Iterable[tuple[int, int]],
        mapped: Iterable[tuple[int, int]],
        tasks: Sequence[Sequence[Any]],
    ) -> None:
        self.live = {address: (size, -1) for address, size in blocks}
        self.mapped = dict(mapped)
        self.used = sum(size for size, _ in self.live.values())
        self.reserved = sum(self.mapped.values())
        self.running = -1
        self._tasks = tasks
        self._ended: dict[tuple[int, int], set[str]] = {}

    def apply(self, event: Event) -> None:
        kind, address, size = event
        if kind == ALLOC:
            self.live[address] = (size, self.running)
            self.used += size
        elif kind == DONE:
            self.used -= self.live.pop(address, (0, 0))[0]
        elif kind == MAP:
            self.mapped[address] = self.mapped.get(address, 0) + size
            self.reserved += size
        elif kind == UNMAP:
            self._unmap(address, size)
        elif kind == BEGIN:
            self.running = address
        elif kind == END:
            task = self._tasks[address]
            self._ended.setdefault((task[1], task[2]), set()).add(task[0])
            self.running = -2  # until the next task begins

    def _unmap(self, address: int, size: int) -> None:
        self.reserved -= size
        for start, length in list(self.mapped.items()):
            if start <= address < start + length:
                del self.mapped[start]
                if address > start:
                    self.mapped[start] = address - start
                if address + size < start + length:
                    self.mapped[address + size] = start + length - address - size
                return

    def category(self, made_by: int) -> str:
        """The use of a block that this task has made."""
        if made_by == -1:
            return "model and before the step"
        if made_by < -1:
            return "inputs and between tasks"
        kind, chunk, microbatch, *_ = self._tasks[made_by]
        ended = self._ended.get((chunk, microbatch), set())
        if made_by == self.running:
            return f"of the running {kind}"
        if kind == "F" and "B" not in ended:
            running = self._tasks[self.running] if self.running >= 0 else None
            mine = running is not None and tuple(running[:3]) == ("B", chunk, microbatch)
            return "activation of the running B" if mine else "activations in flight"
        if kind == "W":
            return "left by W"
        return "kept for W: inputs" if kind == "F" else "kept for W: output gradients"

    def holes(self) -> list[tuple[int, int]]:
        """Address and bytes of what is reserved and not used."""
        found = []
        live = sorted(self.live)
        for start, end in _joined(self.mapped.items()):
            at = start
            first = bisect.bisect_left(live, start)
            for address in live[first : bisect.bisect_left(live, end)]:
                if address > at:
                    found.append((at, address - at))
                at = max(at, address + self.live[address][0])
            if end > at:
                found.append((at, end - at))
        return found

    def categories(self) -> Counter[str]:
        """Bytes of the living blocks."""
        found: Counter[str] = Counter()
        for size, made_by in self.live.values():
            found[self.category(made_by)] += size
        return found


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Adjacent ranges as one, as start and end."""
    found: list[tuple[int, int]] = []
    for start, size in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], start + size)
        else:
            found.append((start, start + size))
    return found


def analyse(record: dict[str, Any]) -> dict[str, Any]:
    """The peaks of a record of :func:`record` and what is behind them, in bytes."""
    blocks, mapped, events, tasks = (
        record[name] for name in ("blocks", "mapped", "events", "tasks")
    )
    heap = Heap(blocks, mapped, tasks)
    most = {"used": 0, "reserved": 0}
    at = {"used": 0, "reserved": 0}
    growths = []
    for number, event in enumerate(events):
        before = heap.reserved
        heap.apply(event)
        for name in most:
            if getattr(heap, name) > most[name]:
                most[name], at[name] = getattr(heap, name), number
        if heap.reserved > before and heap.reserved == most["reserved"]:
            growths.append((number, heap.reserved - before, before - heap.used, heap.running))
    return {
        "used": most["used"],
        "reserved": most["reserved"],
        "at used": _state(blocks, mapped, events[: at["used"] + 1], tasks),
        "at reserved": _state(blocks, mapped, events[: at["reserved"] + 1], tasks),
        "growths": [
            {
                "bytes": size,
                "free before": free,
                "task": task_name(tasks[task]) if task >= 0 else "between tasks",
                "asked": next((e[2] for e in events[number:] if e[0] == ALLOC), 0),
            }
            for number, size, free, task in growths
        ],
    }


def _state(
    blocks: Sequence[tuple[int, int]],
    mapped: Sequence[tuple[int, int]],
    events: Sequence[Event],
    tasks: Sequence[Sequence[Any]],
) -> dict[str, Any]:
    heap = Heap(blocks, mapped, tasks)
    for event in events:
        heap.apply(event)
    holes = sorted((size for _, size in heap.holes()), reverse=True)
    return {
        "running": task_name(tasks[heap.running]) if heap.running >= 0 else "between tasks",
        "used": heap.used,
        "reserved": heap.reserved,
        "categories": dict(heap.categories()),
        "holes": len(holes),
        "free": sum(holes),
        "largest holes": holes[:8],
        "in holes below 64 MiB": sum(size for size in holes if size < 64 * MIB),
    }


def record(step: Callable[[], Any]) -> dict[str, Any]:
    """Run a step with all blocks recorded: ``blocks``, ``mapped`` and ``tasks`` as of
    :class:`Heap`, and ``events``.
    """
    import torch

    base = torch.cuda.memory._snapshot()["segments"]
    tasks: list[tuple[str, int, int]] = []
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1 << 24)
    with _marked(tasks):
        step()
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    trace = torch.cuda.memory._snapshot()["device_traces"][device]
    torch.cuda.memory._record_memory_history(None)
    found = [block for segment in base for block in segment["blocks"]]
    return {
        "mapped": [(block["address"], block["size"]) for block in found],
        "blocks": [(b["address"], b["size"]) for b in found if b["state"] != "inactive"],
        "events": _events(trace),
        "tasks": tasks,
    }


@contextlib.contextmanager
def _marked(tasks: list[tuple[str, int, int]]) -> Iterator[None]:
    """List every task, and mark its begin and end by blocks of sizes that nothing else has."""
    import torch

    from megatron.dpp.core.static import Step, around_steps
    from megatron.dpp.core.steps import Stage

    def mark(end: bool) -> None:
        torch.empty(_MARK[end], dtype=torch.uint8, device="cuda")

    def around(kind: str, own: Any) -> Any:
        def call(stage: Any, chunk: int, microbatch: int, *rest: Any) -> Any:
            tasks.append((kind, chunk, microbatch))
            mark(False)
            inside.append(kind)
            try:
                return own(stage, chunk, microbatch, *rest)
            finally:
                inside.pop()
                mark(True)

        return call

    def before(task: Step, _: Any) -> None:
        if not inside:
            tasks.append(tuple(task))
            mark(False)

    def after(task: Step, _: Any) -> None:
        if not inside:
            mark(True)

    inside: list[str] = []
    own = {name: getattr(Stage, name) for name in ("forward", "backward", "weight")}
    try:
        for name, function in own.items():
            setattr(Stage, name, around(name[0].upper(), function))
        with around_steps(before, after):
            yield
    finally:
        for name, function in own.items():
            setattr(Stage, name, function)


def _events(trace: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    kinds = {
        "alloc": ALLOC, "free_requested": FREE, "free_completed": DONE, "segment_alloc": MAP,
        "segment_map": MAP, "segment_free": UNMAP, "segment_unmap": UNMAP,
    }  # fmt: skip
    found, task, marks = [], -1, set()
    for entry in trace:
        kind, address, size = kinds.get(entry["action"]), entry.get("addr", 0), entry["size"]
        if kind is None:
            continue
        if size in _MARK:
            if kind == ALLOC:
                task += size == _MARK[0]
                found.append((BEGIN if size == _MARK[0] else END, task, 0))
                marks.add(address)
            continue
        if kind == ALLOC:
            marks.discard(address)
        elif kind in (FREE, DONE) and address in marks:
            continue
        found.append((kind, address, size))
    return found
