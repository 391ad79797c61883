"""The example programs do what the README says of them."""

from __future__ import annotations

import re

from tests.runtime.launcher import REPOSITORY, run_ranks


def test_own_loop_learns() -> None:
    output = run_ranks(REPOSITORY / "examples" / "gpt3" / "own_loop.py", 2, [], timeout=120)
    losses = [float(value) for value in re.findall(r"step \d+: loss ([0-9.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0
    assert "RNG state changed" not in output, "without a GPU there is one generator"
