"""One iteration's tasks on one rank, run with megatron-core's own step functions.

``Stage`` executes the forwards, backwards and weight gradients of a rank's chunks, in the order in
which the executor in ``runtime/`` calls it. ``StepCall`` holds the validated keyword arguments of
megatron-core's ``forward_backward_func``, which all schedules take.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.dpp.config import DppConfig
from megatron.dpp.core import boundary, compat, padded
from megatron.dpp.core.boundary import Boundaries, Tensors, TokenCounter
from megatron.dpp.core.cut import Cut, weighted_aux_loss
from megatron.dpp.core.grad_sync import GradSync
from megatron.dpp.core.groups import default_groups
from megatron.dpp.core.head import Head, HeadCut
from megatron.dpp.core.refused import ORDERED, UNSUPPORTED
from megatron.dpp.core.slices import Slices
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.errors import ConfigError, Text, setting
from megatron.dpp.memory import is_readable, saved_bytes


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """The arguments of one ``forward_backward_func`` call, under megatron-core's names."""

    forward_step_func: Callable[..., Any]
    data_iterator: list[Any]
    model: list[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    pg_collection: Any = None
    force_all_reduce: bool = False
    cut: Cut | None = None
    """Its units, which ``num_microbatches`` then counts."""

    @classmethod
    def checked(
        cls, *, data_iterator: Any, model: Any, p2p_communicator: Any = None,
        pg_collection: Any = None, **rest: Any,
    ) -> StepCall:  # fmt: skip
        """Bring single chunks into list form and fill in the process groups.

        Raises:
            ConfigError: arguments that do not fit together.
        """
        chunks = list(model) if isinstance(model, list) else [model]
        iterators = list(data_iterator) if isinstance(data_iterator, list) else [data_iterator]
        if len(iterators) == 1 and len(chunks) > 1:
            raise ConfigError(
                f"data_iterator: {len(chunks)} model chunks need a list of as many iterators, got 1"
            )
        if rest.get("num_microbatches", 1) < 1:
            raise ConfigError(
                f"num_microbatches is {rest['num_microbatches']}: at least 1 is needed"
            )
        known = {field.name for field in dataclasses.fields(cls)} - {"cut"}
        unknown = sorted(rest.keys() - known)
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: megatron-core {compat.VERSION} passes this to its "
                "schedule; the dynamic pipeline does not support it"
            )
        groups = pg_collection or default_groups()
        return cls(data_iterator=iterators, model=chunks, pg_collection=groups, **rest)

    @property
    def config(self) -> Any:
        """megatron-core's config of the model."""
        return get_model_config(self.model[0])

    @property
    def length(self) -> int:
        """The sequence length between stages. It may be nominal: 1 where stages exchange shapes."""
        return self.decoder_seq_length or self.seq_length

    @property
    def varies(self) -> bool:
        """True if microbatches may have unlike lengths."""
        return bool(getattr(self.config, "variable_seq_lengths", False))

    @property
    def num_whole(self) -> int:
        """The host's microbatches, whose losses are divided by their number."""
        return self.num_microbatches if self.cut is None else len(self.cut.groups)

    def longest(self, max_tokens: int) -> int:
        """The greatest sequence length that is known: of this call, of the host's settings, or that
        of a microbatch of ``max_tokens``.
        """
        if self.cut is not None:
            return self.length
        by_tokens = -(-max_tokens // self.micro_batch_size)
        return max(self.length, compat.longest_length(self.config), by_tokens)

    @property
    def has_global_aux_loss(self) -> bool:
        """True if the routers balance their load over all replicas."""
        return "global_aux_loss" in getattr(self.config, "moe_router_load_balancing_type", ())

    @property
    def replays_routing(self) -> bool:
        """True if routers replay recorded choices, by megatron-core's setting or by verl's."""
        names = ("moe_enable_routing_replay", "enable_routing_replay")
        return any(getattr(self.config, name, False) for name in names)

    def refuse_ordered(self) -> None:
        """Refuse settings whose bookkeeping needs megatron-core's own order.

        Raises:
            ConfigError: names the setting.
        """
        config = self.config
        partial = "num_microbatches_with_partial_activation_checkpoints"
        refused = {
            name: f". Without it {gain}"
            for name, (usual, gain) in ORDERED.items()
            if getattr(config, name, usual) != usual
        }
        # A recomputed microbatch counts in its backward, another one in its forward.
        balanced = "moe_router_load_balancing_type='global_aux_loss'"
        if self.has_global_aux_loss and getattr(config, partial, None) is not None:
            refused[f"{balanced} with partial checkpoints"] = ""
        for what, gain in refused.items():
            raise ConfigError(
                f"{what} needs megatron-core's own order of tasks, which the dynamic pipeline does "
                f"not keep; leave it out or train without the dynamic pipeline{gain}"
            )
        for name, usual in UNSUPPORTED.items():
            value = getattr(config, name, usual)
            if value != usual:
                raise ConfigError(f"{name} is {value}: the dynamic pipeline supports {usual} only")

    def check_length(self, longest: int) -> None:
        """Refuse a nominal sequence length where no other is known.

        Raises:
            ConfigError: names the settings that tell.
        """
        if self.varies and longest <= 1:
            max_tokens = setting("max_tokens")
            raise ConfigError(
                f"variable_seq_lengths with seq_length {self.seq_length}: slots and the memory "
                f"cap need the longest length; give {max_tokens}, or pass it as seq_length",
                max_tokens,
            )

    def boundaries(self, length: int) -> Boundaries:
        """The boundaries between this rank's stages and their neighbours, for tensors of a sequence
        length.

        Raises:
            ConfigError: ``adjust_tensor_shapes_fn`` returns no shapes, or several tensors meet a
            model whose losses megatron-core scales by the one tensor of a stage.
        """
        shape, dtype = self._boundary(length)
        sizes = boundary.boundaries(tuple(shape), dtype.itemsize, self.adjust_tensor_shapes_fn)
        for name in ("num_moe_experts", "mtp_num_layers"):
            value = getattr(self.config, name, None)
            if sizes.several and value is not None:
                raise ConfigError(
                    f"adjust_tensor_shapes_fn: {name}={value!r} needs stages that exchange one "
                    f"tensor, not {max(len(sizes.receives), len(sizes.sends))}: megatron-core "
                    "finds the device of its loss's scale there"
                )
        return sizes

    def tokens(self, longest: int, max_tokens: int = 0) -> TokenCounter:
        """Counts the tokens of this call's microbatches, of which those of unlike length have at
        most ``longest`` per sequence; ``max_tokens`` as in :meth:`longest`.
        """
        length = longest if self.varies else self.length
        shape, _ = self._boundary(length)
        hidden = 0 if self.adjust_tensor_shapes_fn else shape[-1]
        if self.varies and max_tokens and -(-max_tokens // self.micro_batch_size) >= longest:
            bound: str = Text(given := setting("max_tokens", max_tokens), given)
        else:
            bound = f"seq_length={length} times micro_batch_size={self.micro_batch_size}"
        return TokenCounter(max(1, shape[0] * shape[1]), hidden, self._parts, bound)

    def captured_rows(self, settings: DppConfig) -> list[int]:
        """Rows of this rank's part of each length that ``length_buckets`` names, up to the
        longest that is known: later calls may be longer.
        """
        return [length // self._parts for length in self.buckets(settings)]

    def buckets(self, settings: DppConfig) -> list[int]:
        """Tokens of each length that ``length_buckets`` names for this call, up to the longest that
        is known."""
        longest, text = self.longest(settings.max_tokens), settings.length_buckets
        repeats = torch.are_deterministic_algorithms_enabled()
        if text == "auto" and self.varies and not repeats and self.why_not_padded() is None:
            text = "geometric"
        chosen = dataclasses.replace(settings, length_buckets=text)
        found = chosen.buckets(longest if text == "geometric" else sys.maxsize, self._parts)
        return [length for length in found if length <= longest]

    def why_not_padded(self) -> str | None:
        """The reason why rows are not padded at the model's door; None if they can be."""
        return padded.why_not(self.model, self.config, self.pg_collection.cp.size())

    def padded_rows(self, settings: DppConfig) -> padded.PaddedRows | None:
        """Pads this call's rows to :meth:`buckets`; None where they stay as they are."""
        lengths = self.buckets(settings)
        if not lengths or self.why_not_padded() is not None:
            return None
        return padded.PaddedRows(self.model, lengths, self._parts)

    def boundary_example(self, settings: DppConfig | None = None) -> torch.Tensor:
        """An uninitialised tensor like those between stages, on the device of the model. With
        ``settings`` it is as long as the longest where lengths may be unlike.
        """
        length = self.length
        if settings is not None and (self.varies or settings.length_buckets not in ("off", "auto")):
            length = self.longest(settings.max_tokens)
        shape, dtype = self._boundary(length)
        return torch.empty(shape, dtype=dtype, device=_device())

    @property
    def _parts(self) -> int:
        """Ranks among which a sequence is divided between stages."""
        groups = self.pg_collection
        tensor = groups.tp.size() if self.config.sequence_parallel else 1
        return int(groups.cp.size() * tensor)

    def _boundary(self, length: int) -> tuple[torch.Size, torch.dtype]:
        """megatron-core's shape for a length, usually [s / (cp * tp if sequence parallel), b, h],
        in the pipeline's dtype.
        """
        config, groups = self.config, self.pg_collection
        dtype = torch.float32 if config.fp32_residual_connection else config.pipeline_dtype
        fixed = copy.copy(config)
        fixed.variable_seq_lengths = False  # else it has no shape to tell
        (shape,) = schedules.get_tensor_shapes(
            seq_length=length, micro_batch_size=self.micro_batch_size, decoder_seq_length=None,
            config=fixed, tp_group=groups.tp, cp_group=groups.cp,
        )  # fmt: skip
        return torch.Size(shape), dtype or config.params_dtype


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
        self._num_tokens = torch.zeros([], dtype=torch.int, device=_device())
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

    @property
    def runs_head_in_forward(self) -> bool:
        """True if this rank's last chunk runs the backward of output layer and loss in F."""
        return self._head is not None

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
        self._measuring = set(range(self._num_chunks)) if is_readable(self._config) else set()

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        """Run F. ``received`` is the previous stage's output (None on the first stage).

        Returns:
            The chunk's output, a list if it is several tensors; the scaled loss on the last stage.
        """
        head = self._head if self.is_last(chunk) else None
        if head is None and self._slices is None:
            output = self._forward(chunk, microbatch, received)
        else:
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
        if store is None and self._slices is None:
            gradient = self._backward(given, output, received)
        else:
            around = store.collect(chunk, microbatch) if store else contextlib.nullcontext()
            with self._running(chunk, microbatch, backward=True), around:
                gradient = self._backward(given, output, received)
        if store and measures:
            self.deferred_bytes[chunk] = store.held_bytes - held
        return gradient

    def _backward(
        self, given: Tensors | None, output: Any, received: Tensors | None
    ) -> Tensors | None:
        if isinstance(output, HeadCut):
            output, received = output.root
        return boundary.backward(given, output, received, self._config)

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


def _device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
