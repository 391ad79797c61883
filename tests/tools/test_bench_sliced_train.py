"""The benchmark of slices under ``train``: its commands, its lengths and its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.dpp_train.launch.main import plan

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import bench_sliced_train as benchmark  # noqa: E402


def test_train_takes_each_arm_and_all_have_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_sliced_train.py", "--small"])
    args = benchmark.parse_arguments()
    lengths = benchmark.drawn(args)
    assert len(lengths) == args.sequences and max(lengths) >= args.longest // 4
    benchmark.write_data(tmp_path / "data", lengths, args)
    kinds, models = set(), set()
    for name in benchmark.ARMS:
        words = benchmark.words(args, name, tmp_path / "data", tmp_path / "run")
        found = plan(words).resolved.parsed
        models.add((found.num_layers, found.hidden_size, found.ffn_hidden_size, found.seq_length))
        kinds.add(
            (found.use_dpp, found.dpp_policy, found.dpp_slice_tokens, found.context_parallel_size,
             found.dpp_activation_cap, found.num_virtual_stages_per_pipeline_rank,
             found.dpp_split_backward)
        )  # fmt: skip
    assert len(models) == 1 and len(kinds) == len(benchmark.ARMS)


def test_slices_are_simulated_to_gain_on_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--ranks", "4", "--layers", "8"])
    args = benchmark.parse_arguments()
    lengths = benchmark.drawn(args)
    static, sliced = (
        benchmark.ARMS[name].simulated(args, lengths) for name in ("static", "dynamic-sliced")
    )
    assert sliced[0] < 0.7 * static[0] and sliced[1] > 0


def test_a_run_is_read_from_its_metrics_and_its_log() -> None:
    log = (
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 3.00 | "
        "reserved: 2.00 | max reserved: 4.00\n"
    )
    step = {"lm loss": 2.0, "grad norm": 1.0, "tokens/s": 10.0}
    lines = [step | {"iteration": i, "seconds": s} for i, s in ((1, 9.0), (2, 0.5), (3, 0.7))]
    first, other = (benchmark.Found(seconds=[20.0]) for _ in range(2))
    first.add([*lines, {"set": "validation", "lm loss": 5.0}], log, untimed=1)
    other.add([lines[1] | {"seconds": 0.25}], "", untimed=1)
    assert first.times == [500.0, 700.0] and other.over(first) == 0.5
    assert first.reserved == 4 * 2**20 and first.allocated == 3 * 2**20
    assert benchmark.largest_difference(other.losses, first.losses) == 0.0
    row = benchmark.row("dynamic", {"static": first, "dynamic": other})
    assert len(row) == benchmark.HEADINGS.count("|") + 1


def test_a_step_that_captures_graphs_does_not_change_the_ratio() -> None:
    """It was a ratio of sums: a step of 597 ms made 0.85 to 0.96."""
    step = {"lm loss": 2.0, "grad norm": 1.0, "tokens/s": 10.0}
    arms = []
    for milliseconds in ((466, 459, 454, 456), (397, 597, 382, 382)):
        one = benchmark.Found()
        lines = [step | {"iteration": i, "seconds": ms / 1e3} for i, ms in enumerate(milliseconds)]
        one.add(lines, "", untimed=-1)
        arms.append(one)
    static, dynamic = arms
    assert dynamic.over(static) == pytest.approx((382 / 454 + 397 / 466) / 2)
