"""Lengths that a host tells before a step: sizes of microbatches, and sequences of packed rows."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("megatron.core.pipeline_parallel")

from megatron.core.pipeline_parallel import schedules

from megatron.dpp import DppConfig, plugin
from megatron.dpp.errors import ConfigError
from tests.plugin.test_plugin import keywords


def test_announced_sizes_reach_the_next_training_step_alone(
    told: list[Any], dynamic_calls: list[dict[str, Any]], static_calls: list[Any]
) -> None:
    plugin.announce([1])  # nothing is installed
    plugin.install(DppConfig(split_backward="off"))
    run = schedules.get_forward_backward_func()
    sizes = [8, 2, 5]
    plugin.announce(sizes)
    sizes.clear()  # the host's own list
    run(**keywords(forward_only=True))
    assert not told, "an evaluation has microbatches of its own"
    run(**keywords())
    run(**keywords())
    assert told == [([8, 2, 5], ())]
    plugin.announce([3, 3, 3])
    run(**keywords(pipeline=1))
    run(**keywords())
    assert len(told) == 1 and len(static_calls) == 1 and len(dynamic_calls) == 4
    plugin.announce([3, 3, 3])
    run(**keywords(pipeline=1, forward_only=True))
    run(**keywords())
    assert told[1:] == [([3, 3, 3], ())], "an evaluation by megatron-core's schedule took none"


@pytest.mark.parametrize("given", [numpy.array([8, 2]), torch.tensor([8, 2])])
def test_sizes_may_be_of_numpy_and_tensors(
    told: list[Any], dynamic_calls: list[dict[str, Any]], given: Any
) -> None:
    plugin.install(DppConfig(split_backward="off"), lengths=lambda _: numpy.array([5, 3]))
    run = schedules.get_forward_backward_func()
    plugin.announce(given)
    run(**keywords())
    run(**keywords())
    assert told == [([8, 2], ()), ([5, 3], ())]


def test_announced_rows_reach_the_next_call(
    told: list[Any], dynamic_calls: list[Any], static_calls: list[Any]
) -> None:
    plugin.install(DppConfig(split_backward="off"))
    run = schedules.get_forward_backward_func()
    rows = [[5, 3], [2], [1, 1, 3]]
    for evaluates in (True, False):
        plugin.announce(rows=rows)
        run(**keywords(forward_only=evaluates))
        run(**keywords(forward_only=evaluates))
    assert told == [([8, 2, 5], rows)] * 2
    plugin.announce(rows=rows)
    run(**keywords(pipeline=1))
    run(**keywords())
    plugin.announce(rows=rows)
    run(**keywords(num_microbatches=3, future_keyword=1))
    assert len(static_calls) == 2 and told[2:] == [([8, 2, 5], rows), ((), ())], "forgotten"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "expected either sizes or rows"),
        ({"sizes": [3], "rows": [[3]]}, "expected either sizes or rows"),
        ({"rows": [[3], []]}, r"row 1 has sequences of \[\] tokens"),
        (
            {"rows": [[3, 0]]},
            r"row 0 has sequences of \[3, 0\] tokens: expected at least one, each",
        ),
    ],
)
def test_rows_that_cannot_be_are_named(given: dict[str, Any], said: str) -> None:
    plugin.install(DppConfig(split_backward="off"))
    with pytest.raises(ConfigError, match=f"announce: .*{said}"):
        plugin.announce(**given)
