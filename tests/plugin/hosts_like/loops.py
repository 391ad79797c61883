"""Training loops in the forms in which hosts call megatron-core's schedule.

Each takes the function that fetches the schedule, and a case, and returns what must be bitwise
equal under every schedule: losses, gradient norms, and weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from tests.runtime.equality_worker import (
    MICRO_BATCH,
    SEQUENCE,
    VOCABULARY,
    build,
    drawn,
    own_part,
)

Fetch = Callable[[], Callable[..., Any]]
"""A host's ``get_forward_backward_func``."""


class Wrapper(torch.nn.Module):
    """A host's own module around a chunk under DDP."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.no_sync, self.zero_grad_buffer = module.no_sync, module.zero_grad_buffer
        self.ddp_config, self.finish_grad_sync = module.ddp_config, module.finish_grad_sync

    def forward(self, *args: Any, **given: Any) -> Any:
        return self.module(*args, **given)


class Job:
    """One model with its optimizer, and what its steps gave."""

    def __init__(self, case: dict[str, Any], fetch: Fetch) -> None:
        self.case, self._fetch = case, fetch
        self.chunks, self.optimizer = build(case)
        self.config = get_model_config(self.chunks[0])
        if case.get("wrapped"):
            self.chunks = [Wrapper(chunk) for chunk in self.chunks]
        self.generators = [drawn(case) for _ in self.chunks]
        self.losses: list[Any] = []
        self.norms: list[Any] = []
        self.order: list[tuple[int, bool]] = []

    def microbatches(self, chunk: int) -> Iterator[torch.Tensor]:
        """Endless tokens [b, s + 1], alike for all chunks."""
        while True:
            yield torch.randint(
                0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=self.generators[chunk]
            )

    def forward_step(self, iterator: Any, model: Any) -> Any:
        tokens = next(iterator).cuda()
        inputs, labels = own_part(tokens[:, :-1]), own_part(tokens[:, 1:])
        places = torch.arange(inputs.shape[1], device="cuda").expand(MICRO_BATCH, -1)
        return model(inputs, places, None, labels=labels), self.loss

    def loss(self, output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return {"log_probs": output.detach().clone()}
        loss = output.float().mean()
        return loss, {"lm loss": loss.detach().clone()}

    def call(self, m: int, **more: Any) -> list[Any]:
        """Call the schedule, as each host does at each step."""
        given = {"seq_length": SEQUENCE, "micro_batch_size": MICRO_BATCH, **more}
        found = self._fetch()(
            forward_step_func=given.pop("forward_step_func", self.forward_step),
            data_iterator=[self.microbatches(number) for number in range(len(self.chunks))],
            model=self.chunks, num_microbatches=m, forward_only=given.pop("forward_only", False),
            **given,
        )  # fmt: skip
        self.losses += [sorted(entry.items()) for entry in found if isinstance(entry, dict)]
        return found

    def zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> None:
        _, norm, _ = self.optimizer.step()
        self.norms.append(norm)

    def found(self) -> dict[str, Any]:
        weights = [p.detach().clone() for chunk in self.chunks for p in chunk.parameters()]
        return {"losses": self.losses, "norms": self.norms, "weights": weights}


def accumulates(fetch: Fetch, case: dict[str, Any]) -> dict[str, Any]:
    """Several calls per optimizer step, whose gradients the host reduces (NeMo-RL's form).

    ``holds``: ``outer`` runs them under the model's own ``no_sync()`` with functions that do
    nothing, ``functions`` gives the model's as ``no_sync_func``, ``null`` a function that does
    nothing, and ``nothing`` gives none.
    """
    job, holds = Job(case, fetch), case["holds"]
    for _ in range(3):
        job.zero()
        job.config.grad_sync_func = job.config.finalize_model_grads_func = None
        if holds == "functions":
            job.config.no_sync_func = [chunk.no_sync for chunk in job.chunks]
            if len(job.chunks) == 1:
                (job.config.no_sync_func,) = job.config.no_sync_func
        else:
            job.config.no_sync_func = None if holds == "nothing" else contextlib.nullcontext
        with contextlib.ExitStack() as held:
            for chunk in job.chunks if holds == "outer" else ():
                held.enter_context(chunk.no_sync())
            for _ in range(case.get("calls", 2)):
                job.call(case["m"])
        finalize_model_grads(job.chunks)
        job.step()
    return job.found()


LOOPS: dict[str, Callable[[Fetch, dict[str, Any]], dict[str, Any]]] = {"accumulates": accumulates}
"""By the name in a case's ``loop``."""
