"""The steps of a host that its trace records, with the coordinates of the rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.runtime import host_trace
from megatron.dpp.runtime.host_trace import StepTrace
from megatron.dpp.trace import NullRecorder, TraceLayout
from megatron.dpp.trace.host import HostTrace


class Group:
    """A process group of some size, in which this rank has a place."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self._size = place, size

    def size(self) -> int:
        return self._size


GROUPS = SimpleNamespace(dp_cp=Group(1, 5), pp=Group(2, 4), tp=Group(0, 3))


class Opened:
    """A recorder: what it was opened with, and what it was told."""

    def __init__(self, folder: str, **given: Any) -> None:
        self.folder, self.given = folder, given
        self.told: list[Any] = []

    def begin_iteration(self, number: int) -> None:
        self.told.append(number)

    def end_iteration(self) -> None:
        self.told.append("end")

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    made: list[Opened] = []

    def open_one(folder: str, **given: Any) -> Opened:
        made.append(Opened(folder, **given))
        return made[-1]

    monkeypatch.setattr(host_trace, "open_recorder", open_one)
    monkeypatch.setattr(host_trace, "default_groups", lambda: GROUPS)
    rank_in = lambda group=None: 42 if group is None else group.place  # noqa: E731
    monkeypatch.setattr(torch.distributed, "get_rank", rank_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return made


def recorded(trace: StepTrace, number: int, schedule: str = "pp", **keywords: Any) -> bool:
    with trace.step(number, {"model": [0, 1], **keywords}, schedule) as recorder:
        return not isinstance(recorder, NullRecorder)


def test_the_trace_is_opened_once_with_the_coordinates_of_the_rank(opened: list[Opened]) -> None:
    said: list[str] = []
    trace = StepTrace(HostTrace(dir="here", interval=3, iterations="1,4-5"), said.append)
    assert recorded(trace, 0, "dpp") and recorded(trace, 1, "pp")
    (one,) = opened
    layout = TraceLayout(
        data=1, pipeline=2, tensor=0, data_size=5, pipeline_size=4, tensor_size=3, num_chunks=2,
        schedule="dpp",
    )  # fmt: skip
    assert one.folder == "here"
    assert one.given == {
        "rank": 42, "layout": layout, "device": "cpu", "iterations": {1, 4, 5}, "interval": 3,
    }  # fmt: skip
    folder = "here/data-5-pipeline-4-tensor-3-dpp"
    assert said == [f"trace: {folder} (megatron-dpp report {folder})"]
    assert one.told == [0, "end", 1, "end"]


def test_context_parallel_ranks_of_a_stage_have_files_of_their_own(opened: list[Opened]) -> None:
    for data, context in itertools.product(range(2), range(2)):
        groups = SimpleNamespace(
            dp_cp=Group(2 * data + context, 4), dp=Group(data, 2), cp=Group(context, 2),
            pp=Group(0, 1), tp=Group(0, 1),
        )  # fmt: skip
        assert recorded(StepTrace(HostTrace(), lambda line: None), 0, pg_collection=groups)
    layouts = [one.given["layout"] for one in opened]
    assert [layout.place for layout in layouts] == [
        (data, 0, 0, context) for data, context in itertools.product(range(2), range(2))
    ]
    assert len({layout.path("here") for layout in layouts}) == 4
    assert layouts[3].file_name() == "benchmark-data-1-pipeline-0-tensor-0-context-1.json"
    assert {layout.directory_name() for layout in layouts} == {
        "data-2-pipeline-1-tensor-1-context-2-pp"
    }


def test_a_run_without_chosen_iterations_records_all_on_its_own_device(
    opened: list[Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 6)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    trace = StepTrace(HostTrace(), lambda line: None)
    own = SimpleNamespace(dp_cp=Group(0, 1), pp=Group(1, 2), tp=Group(0, 1))
    assert recorded(trace, 0, model=torch.nn.Identity(), pg_collection=own)
    given = opened[0].given
    assert (given["device"], given["iterations"], given["interval"]) == ("cuda:6", None, 1)
    assert (given["layout"].num_chunks, given["layout"].pipeline) == (1, 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not recorded(trace, 1)


def test_evaluations_and_repeated_steps_are_not_recorded(opened: list[Opened]) -> None:
    trace = StepTrace(HostTrace(), lambda line: None)
    assert not recorded(trace, 0, forward_only=True)
    assert not opened, "nothing to record yet"
    assert [recorded(trace, number) for number in (0, 0, 2, 1, 2, 3)] == [
        True, False, True, False, False, True,
    ]  # fmt: skip
    assert not recorded(trace, 4, forward_only=True)
    with pytest.raises(KeyError), trace.step(4, {"model": []}, "pp"):
        raise KeyError("x")
    assert opened[0].told == [0, "end", 2, "end", 3, "end", 4, "end"]
    trace.close()
    trace.close()
    assert opened[0].told[-2:] == ["end", "closed"]
    assert not recorded(trace, 5) and len(opened) == 1
    assert not recorded(StepTrace(None, lambda line: None), 0)
