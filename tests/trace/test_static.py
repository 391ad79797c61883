"""Records of the wrappers around megatron-core's step functions, with stand-ins for these."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402

from megatron.dpp.core import compat  # noqa: E402
from megatron.dpp.report.reader import open_run, read_events  # noqa: E402
from megatron.dpp.runtime.host_trace import traced  # noqa: E402
from megatron.dpp.trace import NullRecorder, TraceLayout, open_recorder  # noqa: E402

LAYOUT = TraceLayout(data=0, pipeline=0, tensor=0, data_size=1, pipeline_size=1, tensor_size=1)


@pytest.fixture
def pipeline(monkeypatch):
    """Rank 1 of 2, with a second chunk that gets its input from rank 0."""
    arriving = {"next": torch.ones(2), "prev": torch.ones(2)}

    def communicate(self, *, recv_prev, recv_next, wait_on_reqs=True, **tensors):
        handles = {"recv_prev": SimpleNamespace(wait=lambda: "waited")} if recv_prev else {}
        return (
            arriving["prev"] if recv_prev else None,
            arriving["next"] if recv_next else None,
            None if wait_on_reqs else handles,
        )

    for name in ("schedules:forward_step", "schedules:backward_step"):
        compat.resolve(f"pipeline_parallel.{name}")
    compat.resolve("pipeline_parallel.p2p_communication:P2PCommunicator._communicate")
    monkeypatch.setattr(schedules, "forward_step", lambda *a, **k: (torch.zeros(2), 1))
    monkeypatch.setattr(schedules, "backward_step", lambda *a: torch.full((2,), 2.0))
    monkeypatch.setattr(P2PCommunicator, "_communicate", communicate)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    communicator = object.__new__(P2PCommunicator)
    communicator.pp_group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    communicator.next_rank = communicator.prev_rank = 4
    return communicator


def exchange(communicator, next_=None, prev=None, **wanted):
    wanted = {"recv_prev": False, "recv_next": False} | wanted
    return communicator._communicate(
        tensor_send_next=next_, tensor_send_prev=prev, tensor_shape=None, **wanted
    )


def forward(given, chunk, microbatch):
    return schedules.forward_step(
        None, None, None, 4, given, [], None, vp_stage=chunk, current_microbatch=microbatch
    )[0]


def run_iteration(communicator):
    given, _, handles = exchange(communicator, recv_prev=True, wait_on_reqs=False)
    assert handles["recv_prev"].wait() == "waited"
    output = forward([given], 0, 3)
    _, gradient, _ = exchange(communicator, next_=output, recv_next=True)
    back = schedules.backward_step(given, output, gradient, None, None)
    exchange(communicator, prev=back)


def test_tasks_waits_and_messages_are_recorded(tmp_path, pipeline):
    before = schedules.forward_step, schedules.backward_step, P2PCommunicator._communicate
    with open_recorder(tmp_path, rank=5, layout=LAYOUT) as recorder:
        recorder.begin_iteration(7)
        with traced(recorder):
            run_iteration(pipeline)
        recorder.end_iteration()
        run_iteration(pipeline)
    after = schedules.forward_step, schedules.backward_step, P2PCommunicator._communicate
    assert before == after
    events = list(read_events(open_run(tmp_path)[0]))
    assert [e["name"] for e in events if e["cat"] == "task"] == ["0F3", "0B3"]
    waits = [(e["args"]["cause"], e["args"].get("detail")) for e in events if e["cat"] == "wait"]
    assert waits == [("warm-up", "forward"), ("message", "backward"), ("send", None)]
    ends = ("source", "destination", "chunk", "direction", "microbatch")
    messages = [
        (e["cat"], *(e["args"][key] for key in ends))
        for e in events
        if e["cat"] in ("send", "arrival")
    ]
    # The last rank's output goes to the first rank's next chunk.
    assert messages == [
        ("arrival", 4, 5, 0, "forward", 3),
        ("send", 5, 4, 1, "forward", 3),
        ("arrival", 4, 5, 0, "backward", 3),
        ("send", 5, 4, 0, "backward", 3),
    ]
    assert all("sent_ns" not in e["args"] for e in events if e["cat"] == "arrival")


def test_without_a_trace_nothing_is_wrapped(pipeline):
    before = schedules.forward_step
    with traced(NullRecorder()):
        assert schedules.forward_step is before


def test_an_error_inside_leaves_nothing_wrapped(tmp_path, pipeline):
    before = schedules.forward_step
    recorder = open_recorder(tmp_path, rank=5, layout=LAYOUT)
    with (
        recorder,
        pytest.raises(RuntimeError, match="stop"),
        traced(recorder),
    ):
        raise RuntimeError("stop")
    assert schedules.forward_step is before
