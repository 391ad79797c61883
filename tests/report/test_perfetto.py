"""The merged file in Perfetto's own trace processor: its tables of slices, flows and counters."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.report.merge import merge
from megatron.dpp.report.reader import open_run
from tests.report.synthetic import Run, write

RUN = Run(ranks=4, chunks=2, iterations=2, microbatches=8, clocks={3: "other"}, offset={3: 10**9})
CACHE = Path.home() / ".local/share/perfetto/prebuilts"
"""The package keeps the program there once it has loaded it."""


def binary() -> str | None:
    """Perfetto's ``trace_processor_shell``, if this machine has it; nothing is downloaded."""
    kept = sorted(CACHE.glob("trace_processor_shell-*[!p]"))
    named = os.environ.get("TRACE_PROCESSOR_SHELL") or shutil.which("trace_processor_shell")
    return named or (str(kept[-1]) if kept else None)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """The trace processor with a merged file, and the events of the file."""
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="needs: pip install perfetto")
    shell = binary()
    if shell is None:
        pytest.skip("no trace_processor_shell; TRACE_PROCESSOR_SHELL names one")
    folder = write(RUN, tmp_path_factory.mktemp("perfetto"))
    output = folder / "aggregated.json"
    merge(open_run(folder), output)
    config = perfetto.TraceProcessorConfig(bin_path=shell)
    with perfetto.TraceProcessor(trace=str(output), config=config) as processor:
        yield processor, json.loads(output.read_text())["traceEvents"]


def rows(opened: tuple[Any, list[dict[str, Any]]], query: str) -> list[tuple[Any, ...]]:
    return [tuple(vars(row).values()) for row in opened[0].query(query)]


def test_every_slice_of_the_file_is_in_the_table(opened: Any) -> None:
    found = dict(rows(opened, "select category, count(*) as n from slice group by category"))
    expected: dict[str, int] = {}
    for event in opened[1]:
        if event["ph"] == "X":
            expected[event["cat"]] = expected.get(event["cat"], 0) + 1
    assert found == expected and found["task"] == 4 * 2 * 8 * 3 * 2


def test_tasks_lie_on_a_named_track_of_each_rank(opened: Any) -> None:
    query = """select process.name as rank, thread.name as track, count(*) as n from slice
        join thread_track on slice.track_id = thread_track.id join thread using (utid)
        join process using (upid) where category = 'task' group by 1, 2 order by 1"""
    name = "stage {0} (rank {0})".format
    assert rows(opened, query) == [(name(rank), "tasks", 96) for rank in range(4)]


def test_every_message_is_a_flow_from_its_send_to_its_arrival(opened: Any) -> None:
    query = """select a.category as sent, b.category as came, count(*) as n,
        min(b.ts - a.ts) >= 0 as forward from flow join slice a on flow.slice_out = a.id
        join slice b on flow.slice_in = b.id group by 1, 2"""
    assert rows(opened, query) == [("send", "arrival", 2 * 2 * 8 * 7, 1)]


def test_counters_have_all_their_values(opened: Any) -> None:
    query = """select t.name as name, count(*) as n, max(value) as most from counter
        join process_counter_track t on counter.track_id = t.id group by 1"""
    values = [e["args"]["value"] for e in opened[1] if e["ph"] == "C" and e["name"] == "held"]
    assert rows(opened, query) == [("held value", len(values), max(values))]


def test_nothing_was_lost_or_misread(opened: Any) -> None:
    query = """select name, value from stats
        where value > 0 and severity in ('error', 'data_loss')"""
    assert rows(opened, query) == []
