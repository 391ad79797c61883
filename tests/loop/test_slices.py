"""Training with ``--dpp-slice-tokens`` on sequences of one length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.dpp.report.merge import merge
from megatron.dpp.report.reader import open_run
from megatron.dpp.report.report_command import main as report
from megatron.dpp_train.cost.plan_command import main as plan
from tests.loop.several import train_each
from tests.loop.test_sliced_runs import EXPERTS, REPLICAS, check_equal, check_near

LAYOUT = (
    "--pipeline-model-parallel-size 2 --train-iters 3 --num-layers 4 --hidden-dropout 0 "
    "--attention-dropout 0 --position-embedding-type rope --eval-iters 2 --eval-interval 2"
)


@pytest.mark.timeout(240)
def test_sliced_training_follows_uncut_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and evaluations to fp32's rounding; two orders of slices to the last bit. Its trace
    names slices.
    """
    cut = f"{LAYOUT} --use-dpp --dpp-slice-tokens 6"
    found = train_each(
        tmp_path, 2,
        {
            "uncut": LAYOUT,
            "dynamic": f"{cut} --trace --trace-dir DIR/traces",
            "static": f"{cut} --dpp-policy megatron",
        },
        timeout=200,
    )  # fmt: skip
    uncut, dynamic, static = found["uncut"], found["dynamic"], found["static"]
    for name in ("lm loss", "grad norm"):
        assert dynamic.column(name) == static.column(name)
        near = pytest.approx(uncut.column(name), rel=1e-5)
        assert len(uncut.iterations) == 3 and dynamic.column(name) == near
    assert dynamic.hashes == static.hashes and dynamic.evaluations == static.evaluations
    losses = [[row["lm loss"] for row in each.evaluations] for each in (uncut, dynamic)]
    assert losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-5)
    (traced,) = (tmp_path / "traces").iterdir()
    check_reports(traced, capsys)


def check_reports(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slices are named in the page and the merged trace, and keys have their memory."""
    assert report(["--benchmark_dir", str(traced), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"]["microbatches"], found["run"]["slices"]) == (4, 12)
    layer = 2 * 16 * 16 * (4 + 4)  # keys and values of 16 tokens, and their gradients, in fp32
    for rank in found["ranks"]:
        assert rank["peaks"]["keys"] >= 2 * layer and rank["peaks"]["keys"] % layer == 0
    page = (traced / "report.html").read_text()
    assert "0F1 s2/3" in page and "peak keys" in page
    merge(open_run(traced), traced / "all.json")
    assert '"0B11 s3/3"' in (traced / "all.json").read_text()
    assert plan([str(traced), "--num-layers", "4", "--microbatches", "4"]) == 1
    assert "sequences ran in slices" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [
        (4, f"{EXPERTS} --expert-model-parallel-size 2"),
        (4, f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel"),
        (2, f"{EXPERTS} --num-virtual-stages-per-pipeline-rank 2"),
        (2, "--recompute-granularity selective"),
        (4, f"{REPLICAS} --recompute-granularity selective"),
    ],
    ids=["shared experts", "tensor", "two chunks", "recompute", "replicas"],
)
def test_layouts_in_slices_follow_uncut_training(tmp_path: Path, num_ranks: int, more: str) -> None:
    cut = f"{LAYOUT} {more} --use-dpp --dpp-slice-tokens 6"
    runs = {
        "uncut": f"{LAYOUT} {more}",
        "dynamic": f"{cut} --dpp-inject delay:4ms",
        "static": f"{cut} --dpp-policy megatron --no-dpp-split-backward",
    }
    found = train_each(tmp_path, num_ranks, runs, timeout=250)
    check_equal(found, ("static", "dynamic"))
    check_near(found["uncut"], found["dynamic"])
