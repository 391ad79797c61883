"""One iteration's tasks on one rank, run with megatron-core's own step functions.

``Stage`` executes the forwards, backwards and weight gradients of a rank's chunks, in the order in
which the executor in ``runtime/`` calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron.dpp.core import boundary, compat
from megatron.dpp.core.boundary import Tensors
from megatron.dpp.core.call import StepCall, device
from megatron.dpp.core.cut import weighted_aux_loss
from megatron.dpp.core.grad_sync import GradSync
from megatron.dpp.core.head import Head, HeadCut
from megatron.dpp.core.slices import Slices
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.memory import saved_bytes


class Stage:
    """Runs the tasks of one iteration on this rank's chunks, and keeps tensors between F, B and W.

    Args:
        call: the iteration's arguments.
        rank, num_ranks: place in the pipeline and its size.
        window: activations that Megatron's own order would hold at most on this rank.
        weight_gradients: takes deferred weight gradients; None for a fused backward.
        head: makes the head of the last chunk, whose F then runs the backward of output layer and
            loss; None leaves it to B.
        slices: the attention across slices of a call that is cut.
    """

    def __init__(
        self,
        call: StepCall,
        rank: int,
        num_ranks: int,
        window: int,
        weight_gradients: WeightGradients | None,
        *,
        head: Callable[[torch.nn.Module], Head] | None = None,
        slices: Slices | None = None,
    ) -> None:
        self.call = call
        self.forward_data_store: list[Any] = []
        self._config = call.config
        self._weight_gradients = weight_gradients
        self._num_chunks = len(call.model)
        self._is_last_rank = rank == num_ranks - 1
        self._window = window
        self._slices = slices
        self._kept: dict[tuple[int, int], tuple[Tensors | None, Tensors | HeadCut]] = {}
        ends_here = head is not None and self._is_last_rank and not call.forward_only
        self._head = head(call.model[-1]) if head and ends_here else None
        self.runs_head_in_forward = self._head is not None
        """This rank's last chunk runs the backward of output layer and loss in F."""
        self._num_tokens = torch.zeros([], dtype=torch.int, device=device())
        self._num_forwards = 0
        self._grad_sync = GradSync(call)
        self._num_param_synced = 0
        self._measuring: set[int] = set()
        self.activation_bytes: dict[int, int] = {}
        """Bytes that each chunk's first forward saved, if :meth:`measure` was called."""
        self.deferred_bytes: dict[int, int] = {}
        """Bytes that each chunk's first backward deferred, likewise."""

    def is_last(self, chunk: int) -> bool:
        """True if this chunk computes the loss."""
        return self._is_last_rank and chunk == self._num_chunks - 1

    def open(self) -> None:
        """Begin the iteration; no chunk's gradients are reduced before they are complete."""
        if self._config.timers is not None:
            self._config.timers("forward-backward", log_level=1).start(
                barrier=self._config.barrier_with_L1_time
            )
        self._grad_sync.open()

    def measure(self) -> None:
        """Measure the memory of each chunk's first forward and backward, unless activations are
        offloaded.
        """
        offloads = self._config.cpu_offloading or self._config.fine_grained_activation_offloading
        self._measuring = set() if offloads else set(range(self._num_chunks))  # it would fetch them

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        """Run F. ``received`` is the previous stage's output (None on the first stage).

        Returns:
            The chunk's output, a list if it is several tensors; the scaled loss on the last stage.
        """
        head = self._head if self.is_last(chunk) else None
        around = head.cut() if head else contextlib.nullcontext()
        with self._running(chunk, microbatch), around:
            output = self._forward(chunk, microbatch, received)
        if microbatch == 0 and chunk in self._measuring:
            outputs = output if isinstance(output, list) else [output]
            keys = self._slices.keys.storages if self._slices else ()
            self.activation_bytes[chunk] = saved_bytes(outputs, self.call.model[chunk], keys)
        if not self.call.forward_only:
            kept = None
            if head is not None and isinstance(output, torch.Tensor):
                kept = head.backward(output, received)
            self._kept[chunk, microbatch] = (received, kept or output)
        return output

    def _forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        call, cut = self.call, self.call.cut
        counts = cut is None or cut.units[microbatch].is_last
        self._sync_params(chunk)
        if received is not None and not call.forward_only:
            boundary.want_gradients(received)
        output, num_tokens = schedules.forward_step(
            call.forward_step_func,
            call.data_iterator[chunk],
            call.model[chunk],
            call.num_whole,
            received,
            self.forward_data_store if counts else [],
            self._config,
            cp_group_size=call.pg_collection.cp.size(),
            collect_non_loss_data=call.collect_non_loss_data,
            checkpoint_activations_microbatch=self._checkpointed(),
            is_first_microbatch=schedules.check_first_val_step(
                call.first_val_step, call.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=chunk if self._num_chunks > 1 else None,
            is_last_stage=self.is_last(chunk),
        )
        if isinstance(received, list):
            (output,) = output  # megatron-core answers a list with a list of what was returned
        if isinstance(output, tuple):
            output = list(output)
        if counts:
            self._num_tokens += num_tokens
        self._num_forwards += 1
        return output  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _running(self, chunk: int, microbatch: int, *, backward: bool = False) -> Iterator[None]:
        """Run F or B of a unit in the block, and free the keys of a row whose last task it is."""
        cut, slices = self.call.cut, self._slices
        if cut is None or slices is None:
            yield
            return
        unit = cut.units[microbatch]
        share = cut.share(microbatch) if backward else 1.0
        with slices.running(chunk, unit), weighted_aux_loss(self._config, share):
            yield
        if (unit.begin == 0) if backward else (unit.is_last and self.call.forward_only):
            slices.keys.free(chunk, unit)

    def free_output(self, chunk: int, microbatch: int) -> None:
        """Free the storage of an output that was sent; only its graph is still needed. Several
        outputs stay, as one may be computed from another.
        """
        _, output = self._kept.get((chunk, microbatch), (None, None))
        if isinstance(output, torch.Tensor):
            schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None:
        """Run B; W's work is deferred unless the backward is fused.

        Args:
            received: gradient of the chunk's output, or of each of several (None on the last
                stage).

        Returns:
            Gradient of the chunk's input, or of each; None on the first stage.
        """
        given, output = self._kept.pop((chunk, microbatch))
        store = self._weight_gradients
        measures = store is not None and microbatch == 0 and chunk in self._measuring
        held = store.held_bytes if store and measures else 0
        if isinstance(output, HeadCut):
            output, received = output.root
        around = store.collect(chunk, microbatch) if store else contextlib.nullcontext()
        with self._running(chunk, microbatch, backward=True), around:
            gradient = boundary.backward(given, output, received, self._config)
        if store and measures:
            self.deferred_bytes[chunk] = store.held_bytes - held
        return gradient

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        """Run one piece of W: the deferred weight gradients of one transformer layer."""
        assert self._weight_gradients is not None
        timers = self._config.timers
        if timers is not None:
            timers("weight-compute", log_level=2).start()
        self._weight_gradients.run(chunk, microbatch, piece)
        if timers is not None:
            timers("weight-compute").stop()

    def chunk_complete(self, chunk: int) -> None:
        """Start the reduction of a chunk's complete gradients, if it overlaps."""
        self._grad_sync.complete(chunk)

    def finish(self) -> list[Any]:
        """Finalise gradients after the last task; returns the result of the call."""
        if self._slices is not None and len(self._slices.keys):
            raise AssertionError("keys of slices are left over")
        self.close()
        call, config = self.call, self._config
        if not call.forward_only and config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                call.model,
                self._num_tokens if config.calculate_per_token_loss else None,
                pg_collection=call.pg_collection,
                force_all_reduce=call.force_all_reduce,
            )
        if getattr(config, "fine_grained_activation_offloading", False):
            compat.reset_offload(call.pg_collection, forward_only=call.forward_only)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return self.forward_data_store

    def close(self) -> None:
        """Leave the model's DDP as it was found, also after a task that failed."""
        self._grad_sync.close()

    def _checkpointed(self) -> bool | None:
        """True if the next forward recomputes all layers (partial activation checkpoints); the
        pattern is that of Megatron's order on this rank.
        """
        partial = self._config.num_microbatches_with_partial_activation_checkpoints
        if partial is None:
            return None
        return bool(self._num_forwards % self._window >= partial)

    def _sync_params(self, chunk: int) -> None:
        """Start gathering parameters up to the next chunk (overlapped parameter gathering)."""
        sync = self._config.param_sync_func
        if sync is None or self.call.forward_only:
            return
        while self._num_param_synced < min(chunk + 2, self._num_chunks):
            index = self._num_param_synced
            function = sync[index] if isinstance(sync, list) else sync
            function(self.call.model[index].parameters())
            self._num_param_synced += 1
