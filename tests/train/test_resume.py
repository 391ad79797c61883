"""A resumed run goes on with the numbers of one that was not interrupted, to the last bit."""

from __future__ import annotations

import pytest

from tests.parity.runs import Result
from tests.train.several import train_each

PAIRS = {
    "distributed": "--use-distributed-optimizer",
    "distributed-torch": "--use-distributed-optimizer --ckpt-format torch",
    "reshardable": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
}
"""Runs on two ranks that are saved after iteration 2, and resumed from there."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    lines = {}
    for name, flags in PAIRS.items():
        lines[name] = f"{flags} --save DIR/{name}.ckpt --save-interval 2"
        lines[f"{name}-resumed"] = f"{flags} --load DIR/{name}.ckpt --ckpt-step 2"
    return train_each(tmp_path_factory.mktemp("resume"), 2, lines)


def _check(runs: dict[str, Result], name: str) -> None:
    whole, resumed = runs[name], runs[f"{name}-resumed"]
    assert resumed.column("lm loss") == whole.column("lm loss")[2:]
    assert resumed.column("grad norm") == whole.column("grad norm")[2:]
    assert resumed.hashes == whole.hashes


@pytest.mark.parametrize("name", ["distributed", "distributed-torch", "reshardable"])
def test_a_distributed_optimizer_in_fp32_resumes(runs: dict[str, Result], name: str) -> None:
    _check(runs, name)
