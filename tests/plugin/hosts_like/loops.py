"""Training loops in the forms in which hosts call megatron-core's schedule.

Each takes the function that fetches the schedule, and a case, and returns what must be bitwise
equal under every schedule: losses, gradient norms, and weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron.dpp.core.compat import default_groups
from tests.runtime.equality_worker import (
    HIDDEN,
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
        if case.get("bare"):
            self.chunks = [getattr(chunk, "module", chunk) for chunk in self.chunks]
        self.generators = [drawn(case) for _ in self.chunks]
        self.losses: list[Any] = []
        self.norms: list[Any] = []
        self.order: list[int] = []
        """The chunk of each call of :meth:`forward_step`."""

    def microbatches(self, chunk: int) -> Iterator[torch.Tensor]:
        """Endless tokens [b, s + 1], alike for all chunks."""
        while True:
            yield torch.randint(
                0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=self.generators[chunk]
            )

    def forward_step(self, iterator: Any, model: Any) -> Any:
        self.order.append(next(n for n, chunk in enumerate(self.chunks) if chunk is model))
        if self.case.get("failing") and len(self.order) > 3:
            raise ValueError("of the host's own")
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
    for _ in range(case.get("steps", 2)):
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


def verl(fetch: Fetch, case: dict[str, Any]) -> dict[str, Any]:
    """An actor, its reference without DDP, and a critic of another width: lengths are nominal, the
    actor's weights and gradients leave memory between its turns.
    """
    actor = Job(case, fetch)
    critic = Job(case | {"hidden": case.get("critic", 2 * HIDDEN)}, fetch)
    reference = Job(case | {"bare": True}, fetch)
    for m in (2, 4):
        reference.call(m, forward_only=True, seq_length=1, collect_non_loss_data=True)
        actor.call(m, forward_only=True, seq_length=1, collect_non_loss_data=True)
        for job in (critic, actor):
            job.zero()
            job.call(m, seq_length=1)
            job.step()
        offload(actor.chunks)
        critic.call(m, forward_only=True, seq_length=1)
        restore(actor.chunks)
    return {name: job.found() for name, job in locals().items() if isinstance(job, Job)}


def offload(chunks: list[Any]) -> None:
    """Move weights to other memory, and free them and the gradients."""
    for buffer in (each for chunk in chunks for each in chunk.buffers):
        for name in ("param_data", "grad_data"):
            tensor = getattr(buffer, name)
            if tensor is None or not tensor.untyped_storage().size():
                continue
            if name == "param_data":
                buffer.kept = tensor.clone()
            buffer.kept_sizes = {**getattr(buffer, "kept_sizes", {}), name: tensor.nbytes}
            tensor.untyped_storage().resize_(0)


def restore(chunks: list[Any]) -> None:
    """Undo :func:`offload`; gradients are zero."""
    for buffer in (each for chunk in chunks for each in chunk.buffers):
        for name, size in buffer.kept_sizes.items():
            tensor = getattr(buffer, name)
            tensor.untyped_storage().resize_(size)
            tensor.copy_(buffer.kept) if name == "param_data" else tensor.zero_()


def slime(fetch: Fetch, case: dict[str, Any]) -> dict[str, Any]:
    """Log probabilities first, then steps of unlike counts of microbatches, for which functions are
    set and cleared; the loss counts tokens.
    """
    job = Job(case | {"per_token": True}, fetch)

    def loss(output: torch.Tensor) -> Any:
        kept = output.float().flatten()[: -len(job.norms) or None]
        values = torch.stack([kept.sum().detach(), torch.tensor(float(kept.numel()))])
        return kept.sum(), torch.tensor(kept.numel(), dtype=torch.int), {"values": values}

    job.loss = loss  # type: ignore[method-assign]
    for number, m in enumerate((4, 2, 6)):
        job.config.no_sync_func = job.config.finalize_model_grads_func = None
        job.call(m, forward_only=True)
        job.zero()
        job.config.finalize_model_grads_func = finalize_model_grads
        if case.get("overlap"):
            functions = [chunk.no_sync for chunk in job.chunks]
            job.config.no_sync_func = functions if len(functions) > 1 else functions[0]
        if number == 1:  # a host without the function reduces at the end
            job.config.finalize_model_grads_func = None
            job.call(m)
            finalize_model_grads(job.chunks, sum_of(job, m))
        else:
            job.call(m)
        job.step()
    return job.found()


def sum_of(job: Job, m: int) -> torch.Tensor:
    """The tokens of a step, which the last stage tells."""
    return torch.tensor(m * (MICRO_BATCH * SEQUENCE - len(job.norms)), dtype=torch.int)


def bridge(fetch: Fetch, case: dict[str, Any]) -> dict[str, Any]:
    """Process groups and a communicator in every call, an evaluation after each step, whose hooks
    are off, and a reduction that ``grad_sync_func`` begins.
    """
    job = Job(case, fetch)
    more = {
        "pg_collection": default_groups(),
        "p2p_communicator": P2PCommunicator(
            parallel_state.get_pipeline_model_parallel_group(), job.config
        ),
    }
    hooked = case.get("gather", False)
    for number in range(3):
        job.zero()
        if case.get("overlap"):
            syncs = [chunk.start_grad_sync for chunk in job.chunks]
            job.config.grad_sync_func = [None, syncs, None][number]
        job.call(case["m"], decoder_seq_length=None, adjust_tensor_shapes_fn=None, **more)
        job.step()
        for chunk in job.chunks if hooked else ():
            chunk.disable_forward_pre_hook()
        job.call(case["m"], forward_only=True, **more)
        for chunk in job.chunks if hooked else ():
            chunk.enable_forward_pre_hook()
    return job.found()


def replays(fetch: Fetch, case: dict[str, Any]) -> dict[str, Any]:
    """Forward-only steps whose calls the host sorts by megatron-core's table, as verl's router
    replay does.
    """
    job = Job(case, fetch)
    job.config.moe_enable_routing_replay = case.get("told", True)
    for _ in range(2):
        job.call(case["m"], forward_only=True)
    return job.found() | {"order": job.order}


def freezes(fetch: Fetch, case: dict[str, Any]) -> dict[str, Any]:
    """Weights whose names hold one of ``turns`` are frozen every other step, on all stages or on
    ``stage`` alone.
    """
    job = Job(case, fetch)
    here = parallel_state.get_pipeline_model_parallel_rank()
    for number in range(3):
        for name, parameter in (each for chunk in job.chunks for each in chunk.named_parameters()):
            if here == case.get("stage", here) and any(part in name for part in case["turns"]):
                parameter.requires_grad_(number % 2 == 0)
        job.zero()
        job.call(case["m"])
        job.step()
    return job.found()


LOOPS: dict[str, Callable[[Fetch, dict[str, Any]], dict[str, Any]]] = {
    loop.__name__: loop for loop in (accumulates, verl, slime, bridge, replays, freezes)
}
"""By the name in a case's ``loop``."""
