"""The merged trace, and the errors for directories that cannot be merged."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.report.align import Alignment, ClockOffset
from megatron.dpp.report.merge import _Arrows, _metadata, _Shift, _ticks, merge
from megatron.dpp.report.reader import open_run
from megatron.dpp.trace.schema import ARRIVAL_TRACK, SEND_TRACK, TASK_TRACK, TraceLayout
from tests.report.synthetic import Run, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    run = Run(chunks=2, iterations=2, clocks={3: "other"}, offset={3: 10**9})
    return write(run, tmp_path_factory.mktemp("benchmark"))


@pytest.fixture(scope="module")
def merged(directory):
    output = directory / "aggregated.json"
    merge(open_run(directory), output)
    return json.loads(output.read_text())


def of(merged, **wanted):
    return [
        event
        for event in merged["traceEvents"]
        if all(event.get(key) == value for key, value in wanted.items())
    ]


def test_there_is_one_named_track_per_rank(merged):
    names = [e["args"]["name"] for e in of(merged, name="process_name")]
    assert names == [f"stage {r} (rank {r})" for r in range(4)]
    tasks = of(merged, cat="task", pid=1)
    assert {e["tid"] for e in tasks} == {TASK_TRACK}
    assert len(tasks) == 2 * 2 * 8 * 3
    assert {"1F3", "0B7", "1W0"} <= {e["name"] for e in tasks}


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


def test_messages_seen_at_one_moment_share_a_tick_and_overlap_nothing():
    times = [5.0, 5.0, 5.4, 9.0]
    block = [
        {"tid": 2, "ts": ts, "dur": 50.0, "cat": "arrival", "args": {}} for ts in reversed(times)
    ]
    found = [(e["ts"], round(e["dur"], 3)) for e in _ticks(block)]
    assert found == [(5.0, 0.4), (5.0, 0.4), (5.4, 1.0), (9.0, 1.0)]


def test_every_send_has_an_arrow_to_its_arrival_and_none_runs_backwards(merged):
    starts = {e["id"]: e for e in of(merged, ph="s")}
    ends = {e["id"]: e for e in of(merged, ph="f")}
    assert len(starts) == len(of(merged, cat="send")) == 2 * 2 * 8 * 7
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert ends[number]["ts"] >= start["ts"]
        assert ends[number]["pid"] != start["pid"]


def test_parts_of_a_message_keep_their_numbers_while_sends_are_an_iteration_ahead():
    def slice_of(cat, iteration, microbatch=0):
        args = {"source": 0, "destination": 1, "chunk": 0, "direction": "forward"}
        args |= {"iteration": iteration, "microbatch": microbatch}
        return {"cat": cat, "args": args, "pid": 0, "tid": 0, "ts": 0.0}

    sender, receiver = _Arrows(), _Arrows()
    sent = [sender.event(slice_of("send", 0))["id"] for _ in range(3)]
    assert len(set(sent)) == 3
    arrived = [receiver.event(slice_of("arrival", 0))["id"]]
    receiver.event(slice_of("send", 1))
    arrived += [receiver.event(slice_of("arrival", 0))["id"] for _ in range(2)]
    assert arrived == sent
    for iteration in range(1, 5):
        ids = {sender.event(slice_of("send", iteration, m))["id"] for m in range(4)}
        assert len(ids) == 4 and not ids & set(sent)
    assert len(sender._count) == 4, "of a single iteration"


def test_an_arrival_from_a_rank_without_a_file_has_no_latency():
    clocks = {0: "a", 1: "b"}
    offsets = {"a": ClockOffset(((0, 0, 0),)), "b": ClockOffset(((0, -500, 0),))}
    alignment = Alignment("a", clocks, offsets)
    file = SimpleNamespace(rank=0, time_ns=lambda event: 9_000)
    shift = _Shift(file, alignment, 1_000)
    for source, latency in ((1, {"latency_us": 2.5}), (7, {})):
        event = shift({"ts": 0, "args": {"source": source, "sent_ns": 7_000}})
        assert event == {"ts": 8.0, "args": {"source": source} | latency}


def test_tracks_are_sorted_pipeline_by_pipeline():
    places = [
        (data, tensor, stage) for data in range(2) for tensor in range(3) for stage in range(4)
    ]
    found = []
    for data, tensor, stage in places:
        layout = TraceLayout(
            data=data, tensor=tensor, pipeline=stage, data_size=2, tensor_size=3, pipeline_size=4
        )
        file = SimpleNamespace(layout=layout, rank=5, host="h", device="d")
        events = {event["name"]: event["args"] for event in _metadata(file)}
        name = f"stage {stage}, replica {data}, tensor rank {tensor} (rank 5)"
        assert events["process_name"]["name"] == name
        found.append(events["process_sort_index"]["sort_index"])
    assert found == list(range(24))


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


def test_arrows_are_bound_to_slices(merged):
    for phase, cat in (("s", "send"), ("f", "arrival")):
        slices = {(e["pid"], e["tid"], e["ts"]) for e in of(merged, ph="X", cat=cat)}
        arrows = {(e["pid"], e["tid"], e["ts"]) for e in of(merged, ph=phase)}
        assert arrows == slices


def test_waits_carry_their_cause_and_counters_their_value(merged):
    causes = {e["args"]["cause"] for e in of(merged, cat="wait")}
    assert causes <= {"warm-up", "message"}
    assert of(merged, name="wait: warm-up", pid=3)
    assert max(e["args"]["value"] for e in of(merged, ph="C", name="held")) > 1


def test_the_alignment_is_stored(merged):
    about = merged["otherData"]
    assert [clock["ranks"] for clock in about["alignment"]] == [[0, 1, 2], [3]]
    assert abs(about["alignment"][1]["offset_ns"] + 10**9) <= about["uncertainty_ns"]
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


def damage_line(path):
    lines = path.read_text().splitlines(keepends=True)
    lines[10] = lines[10][:20] + "\n"
    path.write_text("".join(lines))


def foreign_line(path):
    lines = path.read_text().splitlines(keepends=True)
    lines[10] = '{"name":"x"},\n'
    path.write_text("".join(lines))


def other_run(path):
    path.write_text(path.read_text().replace('"run":"synthetic"', '"run":"else"', 1))


def old_schema(path):
    path.write_text(path.read_text().replace('"schema":1', '"schema":0', 1))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, r"missing: benchmark-data-0-pipeline-1-tensor-0\.json"),
        (lambda path: path.write_text(""), r"pipeline-1-tensor-0\.json: not a readable"),
        (lambda path: path.write_text("[\n[]\n"), r"pipeline-1-tensor-0\.json: not a trace"),
        (old_schema, r"pipeline-1-tensor-0\.json: schema version 0"),
        (other_run, r"several runs are mixed.*pipeline-1-tensor-0\.json"),
        (damage_line, r"pipeline-1-tensor-0\.json: line 11 is not an event"),
        (foreign_line, r"pipeline-1-tensor-0\.json: line 11 is not an event"),
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
    with pytest.raises(DataError, match="several runs, name one"):
        open_run(tmp_path)


@pytest.mark.parametrize("start", [ROOT, ROOT / "profiling"])
def test_the_script_works_from_the_root_and_from_its_own_directory(tmp_path, start):
    directory = write(Run(ranks=2, iterations=1), tmp_path)
    done = subprocess.run(
        [sys.executable, str(ROOT / "profiling/aggregate.py"), "--benchmark_dir", str(directory)],
        cwd=start,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert "one clock" in done.stdout
    assert (directory / "aggregated.json").exists()


def test_the_script_says_what_is_wrong(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "profiling/aggregate.py"), "--benchmark_dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"aggregate.py: {tmp_path}: no trace")


def test_tracks_are_no_main_threads_in_older_files_either(directory, tmp_path):
    """Perfetto took the tasks of rank 1 for those of its main thread, the track of its sends."""
    for path in directory.glob("benchmark-*.json"):
        text = path.read_text()
        assert '"tid":1000000' in text
        (tmp_path / path.name).write_text(text.replace('"tid":100000', '"tid":'))
    output = tmp_path / "merged.json"
    merge(open_run(tmp_path), output)
    tracks = {event["tid"] for event in json.loads(output.read_text())["traceEvents"]}
    assert tracks == {TASK_TRACK, SEND_TRACK, ARRIVAL_TRACK}
