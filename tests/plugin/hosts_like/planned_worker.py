"""Steps in a planned order against megatron-core's own schedule, in that order and in the host's.

Run by test_call_order.py, one process per rank: planned_worker.py JSON, a list of cases. Prints
``CASE name ok`` for each.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.dpp import DppConfig, plugin
from tests.plugin.hosts_like.loops import Job
from tests.plugin.hosts_like.worker import main
from tests.runtime.equality_worker import MICRO_BATCH, SEQUENCE, VOCABULARY, initialize

LENGTHS = [2, 16, 4, 15, 2, 12, 16, 3, 2, 7]


class Items:
    """An iterator without ``__iter__``, as Megatron-Bridge's."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._own = iter(batches)

    def __next__(self) -> torch.Tensor:
        return next(self._own)


class Unlike(Job):
    """A model whose steps get microbatches of unlike length."""

    batches: list[torch.Tensor]
    taken: list[int]
    """The microbatches in the order in which this rank's first chunk took them."""

    @classmethod
    def of(cls, case: dict[str, Any]) -> Unlike:
        """The same model each time."""
        torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        return cls(case, lambda: schedules.get_forward_backward_func())

    def microbatches(self, chunk: int) -> Any:
        return Items(self.batches)

    def forward_step(self, iterator: Any, model: Any) -> Any:
        tokens = next(iterator)
        if model is self.chunks[0]:
            self.taken.append(next(n for n, own in enumerate(self.batches) if own is tokens))
        return super().forward_step(iter([tokens]), model)

    def train(self, batches: list[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
        """Losses of a step, and the weights behind it."""
        self.batches, self.taken = batches, []
        self.zero()
        found = self.call(len(batches), seq_length=SEQUENCE)
        self.step()
        weights = [p.detach().clone() for chunk in self.chunks for p in chunk.parameters()]
        return [float(each["lm loss"]) for each in found], weights


def run_case(case: dict[str, Any]) -> None:
    """Two steps: bitwise in the planned order, and to rounding in the host's."""
    initialize(case)
    planned, static, host = (Unlike.of(case) for _ in range(3))
    config = DppConfig(call_order="planned", inject="delay:2ms,message-delay:3ms", **case["run"])
    rng, generator = random.Random(5), torch.Generator().manual_seed(7)
    for step in range(2):
        lengths = rng.sample(LENGTHS, case["m"])
        batches = [
            torch.randint(0, VOCABULARY, (MICRO_BATCH, length + 1), generator=generator)
            for length in lengths
        ]
        with plugin.installed(config, strict=True):
            plugin.announce([MICRO_BATCH * length for length in lengths])
            losses, weights = planned.train(batches)
        order = planned.taken
        assert sorted(order) == list(range(len(order))) and order != sorted(order)
        expected, static_weights = static.train([batches[number] for number in order])
        assert [losses[number] for number in order[: len(losses)]] == expected
        assert all(map(torch.equal, weights, static_weights)), f"{case['name']}, step {step}"
        assert planned.norms == static.norms
        if step == 0:
            assert losses == host.train(batches)[0]
            torch.testing.assert_close(planned.norms, host.norms)


if __name__ == "__main__":
    main(run_case)
