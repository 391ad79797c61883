"""The merged trace, and the errors for directories that cannot be merged."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.report.aggregate_command import merge
from megatron.dpp.report.analysis.model import JobShape
from megatron.dpp.report.reader import open_run
from megatron.dpp.trace.lines import EventLines, first_line, header, last_line
from megatron.dpp.trace.schema import ARRIVAL_TRACK, SEND_TRACK, TASK_TRACK, TraceLayout
from tests.report.synthetic import Channel, Run, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    run = Run(chunks=2, iterations=2, clocks={3: "other"}, offset={3: 10**9})
    return write(run, tmp_path_factory.mktemp("benchmark"))


@pytest.fixture(scope="module")
def merged(directory):
    output = directory / "aggregated.json"
    _, number = merge(open_run(directory), output)
    made = json.loads(output.read_text())
    assert number == sum(event["ph"] != "M" for event in made["traceEvents"])
    return made


def of(merged, **wanted):
    return [
        event
        for event in merged["traceEvents"]
        if all(event.get(key) == value for key, value in wanted.items())
    ]


def test_slices_of_a_track_do_not_overlap(merged):
    for rank in range(4):
        for track in (TASK_TRACK, SEND_TRACK, ARRIVAL_TRACK):
            slices = sorted(
                (e["ts"], e["ts"] + e["dur"])
                for e in of(merged, ph="X", pid=rank, tid=track)
                if e["cat"] != "iteration"
            )
            assert slices
            for (_, end), (start, _) in itertools.pairwise(slices):
                assert start >= end - 0.002


def merged_of(folder, layouts, events=None):
    """The merged trace of ranks with these layouts, on one clock from 0, and their events."""
    for rank, layout in enumerate(layouts):
        head = header(rank, layout, "cpu", "made", 0)
        head["args"]["clock"] = "one"
        lines = [first_line(head), *map(EventLines(rank, 0).line, (events or {}).get(rank, []))]
        path = layout.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines) + last_line(rank, 0))
    output = folder / "merged.json"
    merge(open_run(layouts[0].path(folder).parent, allow_missing=True), output)
    return json.loads(output.read_text())


def stages(number, size):
    """Layouts of the first ranks of a pipeline."""
    sizes = {"data_size": 1, "tensor_size": 1, "pipeline_size": size}
    return [TraceLayout(data=0, tensor=0, pipeline=stage, **sizes) for stage in range(number)]


def send(channel, iteration, microbatch=0):
    return ("send", 0, 0, iteration, channel, microbatch, 8, "shm")


def arrival(channel, iteration=0, microbatch=0, seen=0, sent=0):
    return ("arrival", seen, seen + 50_000, iteration, channel, microbatch, sent, 8, 0, False)


def test_messages_seen_at_one_moment_share_a_tick_and_overlap_nothing(tmp_path):
    channel = Channel(0, 1, 0, 0)
    seen = [arrival(channel, 0, n, ns) for n, ns in enumerate((9_000, 5_400, 5_000, 5_000))]
    made = merged_of(tmp_path, stages(2, 2), {1: seen})
    found = [(e["ts"], round(e["dur"], 3)) for e in of(made, ph="X", cat="arrival")]
    assert found == [(5.0, 0.4), (5.0, 0.4), (5.4, 1.0), (9.0, 1.0)]
    assert {e["args"]["queued_us"] for e in of(made, ph="X", cat="arrival")} == {50.0}


def test_every_send_has_an_arrow_to_its_arrival_and_none_runs_backwards(merged):
    starts = {e["id"]: e for e in of(merged, ph="s")}
    ends = {e["id"]: e for e in of(merged, ph="f")}
    assert len(starts) == len(of(merged, cat="send")) == 2 * 2 * 8 * 7
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert ends[number]["ts"] >= start["ts"]
        assert ends[number]["pid"] != start["pid"]


def test_parts_of_a_message_keep_their_numbers_while_sends_are_an_iteration_ahead(tmp_path):
    channel, back = Channel(0, 1, 0, 0), Channel(1, 0, 0, 1)
    later = [send(channel, number, m) for number in range(1, 5) for m in range(4)]
    events = {
        0: [*[send(channel, 0)] * 3, *later],
        1: [arrival(channel), send(back, 1), arrival(channel), arrival(channel)],
    }
    made = merged_of(tmp_path, stages(2, 2), events)
    sent = [e["id"] for e in of(made, ph="s", pid=0)]
    assert [e["id"] for e in of(made, ph="f", pid=1)] == sent[:3]
    assert len(set(sent)) == 3 + 4 * 4 and max(map(int, sent)) < 1 << 53, "JavaScript reads them"


def test_an_arrival_from_a_rank_without_a_file_has_no_latency(tmp_path):
    events = [arrival(Channel(source, 0, 0, 0), 0, 0, 9_000, 7_000) for source in (1, 7)]
    made = merged_of(tmp_path, stages(2, 8), {0: events})
    found = [e["args"] for e in of(made, ph="X", cat="arrival")]
    assert [args.get("latency_us") for args in found] == [2.0, None]
    assert not any("sent_ns" in args for args in found)


def test_tracks_are_sorted_pipeline_by_pipeline(tmp_path):
    places = list(itertools.product(range(2), range(3), range(2), (3, 2, 1, 0)))
    sizes = {"data_size": 2, "tensor_size": 3, "context_size": 2, "pipeline_size": 4}
    layouts = [
        TraceLayout(data=d, tensor=t, context=c, pipeline=s, **sizes) for d, t, c, s in places
    ]
    made = merged_of(tmp_path, layouts)
    assert [e["args"]["name"] for e in of(made, name="process_name")] == [
        f"stage {stage}, replica {data}, tensor rank {tensor}, context rank {context} (rank {rank})"
        for rank, (data, tensor, context, stage) in enumerate(places)
    ]
    orders = [e["args"]["sort_index"] for e in of(made, name="process_sort_index")]
    assert orders == [rank // 4 * 4 + stage for rank, (*_, stage) in enumerate(places)]
    shape = JobShape.of(open_run(layouts[0].path(tmp_path).parent))
    assert len(shape.pipelines()) == 12 and {len(ranks) for ranks in shape.pipelines()} == {4}


def test_arrivals_say_how_long_they_travelled_across_clocks(merged):
    """A hop takes 100 us, give or take; clocks are known to within an uncertainty."""
    arrivals = of(merged, cat="arrival")
    slack = merged["otherData"]["uncertainty_ns"] / 1000
    for event in arrivals:
        args = event["args"]
        across = 3 in (event["pid"], args["source"])
        assert args["latency_us"] == pytest.approx(100, abs=10 + across * slack)
        assert "sent_ns" not in args and args["queued_us"] >= 0
    assert {event["pid"] for event in arrivals} == {0, 1, 2, 3}


def test_the_alignment_is_stored(merged):
    about = merged["otherData"]
    assert 0 < about["uncertainty_ns"] < 200_000
    assert about["cut_short"] == []


def test_a_run_cut_short_is_merged_and_reported(tmp_path):
    directory = write(Run(ranks=2, iterations=2), tmp_path)
    path = next(directory.glob("*pipeline-1*"))
    path.write_bytes(path.read_bytes()[:-200])
    _, count = merge(open_run(directory), directory / "out.json.gz")
    with gzip.open(directory / "out.json.gz", "rt") as file:
        merged = json.load(file)
    assert merged["otherData"]["cut_short"] == [1]
    assert count > 100


def damage(path):
    lines = path.read_text().splitlines(keepends=True)
    lines[10] = lines[10][:20] + "\n"
    path.write_text("".join(lines))


def other_run(path):
    path.write_text(path.read_text().replace('"run":"synthetic"', '"run":"else"', 1))


def old_schema(path):
    path.write_text(path.read_text().replace('"schema":1', '"schema":0', 1))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_text(""), r"pipeline-1-tensor-0\.json: not a readable"),
        (lambda path: path.write_text("[\n[]\n"), r"pipeline-1-tensor-0\.json: not a trace"),
        (old_schema, r"pipeline-1-tensor-0\.json: schema version 0"),
        (other_run, r"several runs are mixed.*pipeline-1-tensor-0\.json"),
        (damage, r"pipeline-1-tensor-0\.json: line 11 is not an event"),
    ],
)
def test_what_cannot_be_merged_is_named_and_leaves_no_output(tmp_path, harm, message):
    directory = write(Run(ranks=2, iterations=1), tmp_path)
    harm(next(directory.glob("*pipeline-1*")))
    before = set(directory.iterdir())
    with pytest.raises(DataError, match=message):
        merge(open_run(directory), directory / "aggregated.json")
    assert set(directory.iterdir()) == before


def test_directories_without_a_run_or_with_several_are_errors(tmp_path):
    with pytest.raises(DataError, match="no such directory"):
        open_run(tmp_path / "none")
    with pytest.raises(DataError, match="no trace"):
        open_run(tmp_path)
    write(Run(ranks=2, iterations=1), tmp_path)
    assert len(open_run(tmp_path)) == 2
    write(Run(ranks=3, iterations=1), tmp_path)
    with pytest.raises(DataError, match="files of several runs are mixed"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("aggregate.py", "one clock"),
        ("profiling/aggregate.py", "one clock"),
        ("tools/monitor.py --once", "ended"),
    ],
)
def test_a_script_of_its_own_is_the_command(tmp_path, script, said):
    directory = write(Run(ranks=2, iterations=1), tmp_path / "traces")
    command = [sys.executable, *f"{ROOT}/{script} --benchmark_dir".split(), str(directory)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and said in done.stdout
