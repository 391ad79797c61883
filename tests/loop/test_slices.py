"""Training with ``--dpp-slice-tokens`` on sequences of one length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.several import train_each

LAYOUT = (
    "--pipeline-model-parallel-size 2 --train-iters 4 --num-layers 4 --hidden-dropout 0 "
    "--attention-dropout 0 --position-embedding-type rope --eval-iters 2 --eval-interval 2"
)


@pytest.mark.timeout(240)
def test_sliced_training_follows_uncut_training(tmp_path: Path) -> None:
    """Losses and evaluations to fp32's rounding; two orders of slices to the last bit."""
    cut = f"{LAYOUT} --use-dpp --dpp-slice-tokens 6"
    found = train_each(
        tmp_path, 2,
        {"uncut": LAYOUT, "dynamic": cut, "static": f"{cut} --dpp-policy megatron"},
        timeout=200,
    )  # fmt: skip
    uncut, dynamic, static = found["uncut"], found["dynamic"], found["static"]
    for name in ("lm loss", "grad norm"):
        assert dynamic.column(name) == static.column(name)
        near = pytest.approx(uncut.column(name), rel=1e-5)
        assert len(uncut.iterations) == 4 and dynamic.column(name) == near
    assert dynamic.hashes == static.hashes and dynamic.evaluations == static.evaluations
    losses = [[row["lm loss"] for row in each.evaluations] for each in (uncut, dynamic)]
    assert losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-5)
