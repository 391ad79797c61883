"""The load of experts in the report: its imbalance, and the time that it costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.dpp.report.aggregate_command import merge
from megatron.dpp.report.align import align
from megatron.dpp.report.analysis.experts import LayerLoad
from megatron.dpp.report.analysis.sentences import EVEN_EXPERTS
from megatron.dpp.report.reader import open_run
from megatron.dpp.report.report_command import Report, build_parser, build_report
from tests.report.synthetic import MS, Run, write

TOKEN_NS = 20_000
"""Time of a token; a balanced rank has 200 of them: 4 of a forward's 10 ms."""


def run_of(most: int, replicas: int = 2) -> Run:
    """Two replicas that share experts. The first one's two have ``most`` of 400 tokens; the tasks
    of both take as long as its.
    """
    loads = [most, 400 - most]

    def experts(replica: int, rank: int, microbatch: int) -> tuple[list[int], int]:
        tokens = loads[replica] - microbatch % 2
        return [tokens - tokens // 4, tokens // 4], tokens * TOKEN_NS

    def cost(iteration: int, rank: int, kind: str, chunk: int, microbatch: int) -> int:
        return 6 * MS + max(loads) * TOKEN_NS

    return Run(ranks=2, replicas=replicas, experts=experts, cost=cost, jitter=0.0)


def reported(directory: Path) -> Report:
    parser = build_parser("report")
    return build_report(parser.parse_args(["--benchmark_dir", str(directory)]), live=True)


def words(report: Report) -> str:
    return "\n".join(report.sentences)


def test_the_report_says_that_experts_and_not_the_pipeline_cost_the_time(tmp_path: Path) -> None:
    report = reported(write(run_of(350), tmp_path))
    rows = report.pipeline.experts
    assert [(row.layer, row.group_size) for row in rows] == [(1, 2), (2, 2)]
    for row in rows:
        assert row.imbalance == pytest.approx(263 / 100, rel=0.01)
        assert row.rank_imbalance == pytest.approx(350 / 200, rel=0.01)
        assert row.lost_ms == pytest.approx(150 * TOKEN_NS / MS, rel=0.01)
    gain = next(row.gain for row in report.pipeline.what_if if row.name == EVEN_EXPERTS)
    # 3 of 13 ms in each task; the optimizer's time stays, and the hops'.
    assert gain == pytest.approx(3 / 13, rel=0.05)
    assert "The imbalance of experts, and not the pipeline, costs most" in words(report)


def test_a_small_imbalance_costs_less_than_the_pipeline(tmp_path: Path) -> None:
    text = words(reported(write(run_of(210), tmp_path)))
    assert "The imbalance of experts takes about" in text and "not the pipeline" not in text
    even = words(reported(write(run_of(201), tmp_path / "even")))
    assert "That costs less than 1% of an iteration" in even
    short = reported(write(dataclasses.replace(run_of(350), iterations=1), tmp_path / "short"))
    assert [row.layer for row in short.pipeline.experts] == [1, 2]


def test_a_rank_with_all_experts_waits_for_none(tmp_path: Path) -> None:
    report = reported(write(run_of(350, replicas=1), tmp_path))
    assert "No rank waits for another's experts" in words(report)
    assert not any(row.name == EVEN_EXPERTS for row in report.pipeline.what_if)


def test_experts_are_slices_within_their_forwards_in_the_merged_file(tmp_path: Path) -> None:
    files = open_run(write(run_of(350), tmp_path))
    merged = tmp_path / "merged.json"
    merge(files, merged)
    assert '"name":"experts of layer 2"' in merged.read_text()
    assert align(files).uncertainty_ns >= 0


@pytest.mark.parametrize(
    ("points", "slope"),
    [
        ([(10, 100), (10, 300)], 0.0),  # one number of tokens tells nothing
        ([(10, 150), (20, 250)], 10.0),
        ([(10, 250), (20, 150)], 0.0),  # more tokens are not faster
        ([(10, 10), (20, 2000)], 67.0),  # not more than all of the time
        ([(0, 0), (0, 0)], 0.0),
    ],
)
def test_time_per_token_is_the_slope_over_ranks(
    points: list[tuple[int, int]], slope: float
) -> None:
    load = LayerLoad()
    for tokens, time in points:
        load.points = [
            a + b
            for a, b in zip(load.points, (1, tokens, time, tokens**2, tokens * time), strict=True)
        ]
    assert load.ns_per_token() == pytest.approx(slope)
