"""The arms of the benchmarks, and the table of their gains."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import arms  # noqa: E402
import bench_plugin  # noqa: E402
from bench_schedule import Name  # noqa: E402
from bench_schedule import measured as rows_as_arms  # noqa: E402
from plugin_group import Line  # noqa: E402


def measured(**times: float) -> list[arms.Measured]:
    """Arms by a short name and the number of queues, with one time each."""
    names = {"static": arms.STATIC, "links": arms.LINKS, "graphs": arms.GRAPHS}
    found = []
    for key, ms in times.items():
        name, _, queues = key.partition("_")
        found.append(arms.Measured(names.get(name, name), "g", queues, [ms], 2e9))
    return found


def test_parts_add_up_to_the_whole_and_the_best_static_row_is_the_base() -> None:
    heads, rows = arms.gain_rows(
        measured(static_1=110.0, static_8=100.0, links=98.0, megatron=90.0, dynamic=80.0),
        graphs=False,
    )
    assert heads[6:] == ["transport, %", "W, %", "order + memory, %", "all, %", "losses equal"]
    ratios, cells = [row[5] for row in rows], [row[6:-1] for row in rows]
    assert ratios == ["1.100", "1.000", "0.980", "0.900", "0.800"]
    assert cells[0] == cells[1] == ["-"] * 4
    assert cells[-1] == ["2.0", "8.0", "10.0", "20.0"]
    assert [row[4] for row in rows] == ["2.00"] * 5


def test_graphs_are_a_part_where_the_dynamic_arms_have_them() -> None:
    found = measured(static=200.0, graphs=120.0, megatron=110.0)
    heads, rows = arms.gain_rows(found, graphs=True)
    assert heads[6:-1] == ["graphs, %", "transport + W, %", "all, %"]
    assert rows[-1][6:-1] == ["40.0", "5.0", "45.0"]


@pytest.mark.parametrize("graphs", [False, True])
def test_an_arm_without_graphs_separates_them_from_w(graphs: bool) -> None:
    found = measured(static=200.0, **{"eager megatron": 180.0}, megatron=110.0, dynamic=100.0)
    heads, rows = arms.gain_rows(found, graphs=graphs)
    assert heads[6:-1] == ["graphs, %", "transport + W, %", "order + memory, %", "all, %"]
    assert rows[-1][6:-1] == ["35.0", "10.0", "5.0", "50.0"]
    assert rows[-2][6:-1] == ["35.0", "10.0", "-", "45.0"]


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("static2", arms.STATIC), ("linksstatic2", arms.LINKS), ("megatron2", "megatron"),
        ("fused1", "fused"), ("tracedcapsplit2", "dynamic, cap static"), ("split10", "dynamic"),
    ],
)  # fmt: skip
def test_schedules_are_arms(text: str, arm: str) -> None:
    assert Name.parse(text).arm == arm


def test_arms_are_settings() -> None:
    assert arms.ARMS["fused"].settings()["split_backward"] == "off"
    config = arms.ARMS["megatron"].config(cuda_graphs="off")
    assert (config.policy, config.activation_cap, config.split_backward) == (
        "megatron", "static", "on",
    )  # fmt: skip


def test_schedules_are_compared_by_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    names = [Name.parse(text) for text in ("static2", "megatron2", "split2", "static1")]
    rows = [
        {"schedule": name.text, "microbatches": 8, "all_ms": [ms, 1.1 * ms, 1.3 * ms]}
        for name, ms in zip(names, (50.0, 45.0, 40.0, 60.0), strict=True)
    ]
    arms.print_gains(rows_as_arms(names, rows))
    out = capsys.readouterr().out
    assert "| v=2, m=8 | static | - | 55.0 (50.0..65.0, 3) | - | 1.000 |" in out
    assert "transport + W, %" in out
    assert "| v=2, m=8 | dynamic | - | 44.0 (40.0..52.0, 3) | - | 0.800 |" in out


def test_turns_of_the_plugin_are_arms() -> None:
    args = argparse.Namespace(untimed=1, alone=False)
    eight = [
        Line(name, number, ms / 1e3, 0, int(3e9), loss, 2.0, captured=False)
        for name, times in (("static", (99.0, 97.0)), ("dynamic", (79.0, 81.0)))
        for ms in times
        for number in range(3)
        for loss in (7.0, None)  # the first stage's rank has no loss
    ]
    one = [
        Line("static", number, 0.11, 0, int(2e9), 7.0, 2.0, captured=False) for number in range(3)
    ]
    found = [*bench_plugin.gains(args, "unlike", [("8", eight), ("1", one)])]
    assert [(each.arm, each.queues, len(each.times)) for each in found] == [
        (arms.STATIC, "8", 2), ("dynamic", "8", 2), (arms.STATIC, "1", 1),
    ]  # fmt: skip
    assert [each.equal for each in found] == ["bitwise"] * 3
    _, rows = arms.gain_rows(found, graphs=False)
    assert rows[1][4:7] == ["3.00", "0.816", "18.4"]


def test_a_loss_of_the_plugin_that_differs_is_shown() -> None:
    args = argparse.Namespace(untimed=0, alone=False)
    lines = [Line(arm, 0, 0.1, 0, 0, 8.0, norm, captured=False)
             for arm, norm in (("static", 2.0), ("fused", 2.02))]  # fmt: skip
    assert [one.equal for one in bench_plugin.gains(args, "equal", [("8", lines)])] == [
        "bitwise", "1e-02",
    ]  # fmt: skip
