"""Traces of unmodified versions of Megatron-LM, and the commands that read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.dpp.report import monitor_command as monitor
from megatron.dpp.report import report_command as report
from megatron.dpp.report.reader import open_run, read_events
from megatron.dpp.schedule import Geometry
from megatron.dpp.schedule.reference import reference_order
from tests.plugin.hosts import DYNAMIC, PP2X2, Hosts, records

pytestmark = pytest.mark.timeout(500)  # each test runs a host up to three times
VERSIONS = ("core_v0.16.1", "main-2026-08-22")
OWN = "--dpp-trace-only --dpp-trace-iterations 1-2"


def tasks(folder: Path, iteration: int) -> list[list[str]]:
    """The names of each rank's forwards and backwards, in the order in which they began."""
    return [
        [
            event["name"]
            for event in sorted(read_events(file, ("task",)), key=lambda event: event["ts"])
            if event["args"]["iteration"] == iteration and event["args"]["kind"] in "FB"
        ]
        for file in open_run(folder)
    ]


def read_by_all_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the commands on a trace; each must find two whole iterations of two ranks."""
    where = ["--benchmark_dir", str(folder)]
    capsys.readouterr()
    assert report.main([*where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["iteration"] for one in found["iterations"]] == [1, 2]
    assert found["run"]["pipeline"] == 2 and found["what_if"] and found["fidelity"] > 0.3
    assert (folder / "report.html").is_file()
    assert monitor.main([*where, "--once"]) == 0
    assert capsys.readouterr().out.count("ended") == 1 + 2


def check_metrics(file: Path, own: list[str]) -> None:
    """Compare a metrics file with what the last rank's training steps returned."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    returned = [result for name, result, *_ in map(json.loads, own) if name == "train_step"]
    assert len(steps) == len(returned) == 3
    for number, (step, result) in enumerate(zip(steps, returned, strict=True), 1):
        (loss,) = result[0]["lm loss"]
        assert step["loss"].hex() == loss and step["grad_norm"].hex() in result
        assert (step["iteration"], step["train_iters"], step["tokens"]) == (number, 3, 16 * 64)
    assert [line["iteration"] for line in lines if "validation_loss" in line] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_static_schedule_is_recorded_and_stays(
    hosts: Hosts, version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = hosts.run(version, 2, f"{PP2X2} {OWN} --dpp-trace-dir {tmp_path}", tmp_path / "own")
    assert records(tmp_path / "own", 2) == records(hosts.static(version, 2, PP2X2), 2)
    assert "dynamic pipeline" not in output
    folder = tmp_path / "data-1-pipeline-2-tensor-1-pp"
    assert output.count(f"trace: {folder} ") == 1
    for rank, names in enumerate(tasks(folder, 1)):
        geometry = Geometry(num_ranks=2, rank=rank, num_chunks=2, num_microbatches=8)
        assert names == [str(action) for action in reference_order(geometry)]
    assert tasks(folder, 0) == [[], []]
    read_by_all_commands(folder, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_dynamic_schedule_is_recorded_and_run_again(
    hosts: Hosts, version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = f"{PP2X2} {DYNAMIC} --dpp-trace --dpp-trace-dir"
    decisions = tmp_path / "decisions"
    metrics = tmp_path / "metrics.jsonl"
    flags = f"{traced} {tmp_path} --dpp-trace-iterations 1-2 --dpp-record {decisions}"
    hosts.run(version, 2, f"{flags} --metrics-file {metrics}", tmp_path / "first")
    check_metrics(metrics, records(tmp_path / "first", 2)[1])
    assert records(tmp_path / "first", 2) == records(hosts.static(version, 2, PP2X2), 2)
    again = tmp_path / "again"
    flags = f"{traced} {again} --dpp-inject slow-rank:0:3 --dpp-replay {decisions}"
    hosts.run(version, 2, flags, tmp_path / "second")
    name = "data-1-pipeline-2-tensor-1-dpp"
    assert tasks(tmp_path / name, 2) == tasks(again / name, 2)
    assert all(len(set(names)) == 32 for names in tasks(again / name, 2))
    read_by_all_commands(tmp_path / name, capsys)
