"""CUDA graphs of a chunk's forward, backward and weight gradients.

Launching the kernels of one task costs the host milliseconds, which a schedule that decides late
cannot hide. ``ChunkGraphs`` captures the transformer block of each model chunk once and replays it
with one launch. Embedding, LM head and loss stay eager.

Tasks run in no fixed order, so graphs cannot share memory in one: every chunk activation in flight
has a *slot*, a memory pool and buffers, from its F until its last W. A slot is made when a forward
finds none free, so the activation cap bounds their number. Any chunk may use any slot, one at a
time. megatron-core's own graphs (``cuda_graph_impl="local"``) share one pool in the order of a
static schedule.

A chunk that cannot be captured runs eagerly, and the reason is logged once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config

from megatron.dpp.config import ENGINE_ROWS
from megatron.dpp.core.graphs import eight_bit
from megatron.dpp.core.graphs.block import GraphedBlock
from megatron.dpp.core.graphs.capture import Capture, CapturedRng, cuda_capture
from megatron.dpp.core.graphs.parts import ATTEND, BeforeExperts, Part, Whole, has_own_attention
from megatron.dpp.core.graphs.pools import Pools
from megatron.dpp.core.model import decoder_block, routes_by_device
from megatron.dpp.core.rng import needs_task_rng
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.errors import Text

_EAGER = "runs without graphs"
WARM_UP_STEPS = 2
"""Eager training steps before the capture, for initialisation and measurements."""


class ChunkGraphs:
    """The CUDA graphs of one rank's model chunks.

    Args:
        chunks: in chunk order, each wrapped by megatron-core's DistributedDataParallel.
        store: the deferred weight gradients of the same chunks; None with a fused backward.
        log: called with a line per reason and per change of size.
        wanted: asked once, after the first steps, with the numbers of the chunks that can be
            captured, whether to capture at all.
        capture: how work is captured; None captures CUDA graphs on the current device.
        rows: lengths of a block's inputs that are captured; the longest alone without them.
        most: activations of the longest microbatch that may be held, for slots of several lengths.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        store: WeightGradients | None,
        log: Callable[[str], None],
        wanted: Callable[[Sequence[int]], bool],
        capture: Capture | None = None,
        *,
        rows: Sequence[int] = (),
        most: Callable[[], float] | None = None,
    ) -> None:
        self._log, self._said, self._wanted = log, set[str](), wanted
        self._rows, self._most = rows, most
        self._blocks: list[GraphedBlock] = []
        self._numbers: list[int] = []
        self._eager: list[str | None] = []
        self._pools: list[Pools] = []
        """The slots of each block; those of whole blocks are the same."""
        self._slot_bytes = 0.0
        self._addresses: list[list[int]] = []
        self._num_steps = self._num_said = self._num_graphs = 0
        self.num_captures = 0
        """Steps so far in which something was captured."""
        self._settled = False
        config = get_model_config(chunks[0])
        self._tensor_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        # A context-parallel rank attends to halves of its rows, too.
        self._unit = ENGINE_ROWS * (2 if config.context_parallel_size > 1 else 1)
        self._by_engine = any(
            type(module).__module__.startswith("transformer_engine")
            for chunk in chunks
            for module in chunk.modules()
        )
        rng = CapturedRng()
        draws = capture is None and needs_task_rng(chunks)
        capture = capture or cuda_capture(rng)
        for number, chunk in enumerate(chunks):
            say = partial(self._say, number)
            parts, reason = parts_of(chunk)
            for part in parts:
                self._numbers.append(number)
                self._blocks.append(
                    GraphedBlock(chunk, part, store, capture, rng if draws else None, say)
                )
            if reason is not None:
                say(f"{'replays what is before experts alone' if parts else _EAGER}: {reason}")
        self.inspect()

    @property
    def awaits_size(self) -> bool:
        """True until :meth:`keep_size` is called, if whole chunks may be captured. Slots of
        parts of layers count as their activations do without graphs.
        """
        whole = any(isinstance(block.part, Whole) for block in self._blocks)
        return whole and not self._slot_bytes

    @property
    def captures(self) -> bool:
        """Some chunk is captured, or may yet be."""
        return bool(self._blocks)

    @property
    def replays(self) -> bool:
        """A step has been replayed from slots."""
        return any(pools.made for pools in self._pools)

    def slot_bytes(self, eager: float) -> float:
        """Bytes of one chunk activation of the longest microbatch in a slot; 0 without slots.

        Args:
            eager: its bytes without graphs, by which an estimate from shorter ones is judged.
        """
        return max((pools.slot_bytes(eager) for pools in self._pools), default=0)

    def keep_size(self, slot_bytes: float) -> None:
        """Take an activation's size, and drop this step's slots: a cap in bytes allows fewer."""
        self._slot_bytes, self._pools = slot_bytes, []

    def inspect(self) -> bool:
        """Look at the chunks before a training step, as hosts change them; False if graphs must be
        made anew.
        """
        if not all(block.is_as_built() for block in self._blocks):
            return False
        self._eager = [block.part.why_eager() for block in self._blocks]
        return True

    def close(self) -> None:
        """Free the graphs, without which NCCL's communicators cannot be destroyed."""
        self._blocks.clear()
        self._pools.clear()
        gc.collect()  # graphs and their slots know each other

    def _say(self, chunk: int, text: str) -> None:
        line = Text(f"CUDA graphs: chunk {chunk} {text}", text)
        if line not in self._said:
            self._said.add(line)
            self._log(line)

    def settle(self, example: torch.Tensor) -> bool:
        """True if the next step replays graphs, which is decided once, after the first steps.

        Args:
            example: as of :meth:`bound`.
        """
        if self._num_steps < WARM_UP_STEPS:
            return False
        if not self._settled and self._blocks:
            self._settled = True
            numbers = list(dict.fromkeys(self._numbers))
            if not (self._wanted(numbers) and self._attends(example)):
                self._blocks.clear()
        return bool(self._blocks)

    @contextlib.contextmanager
    def bound(self, example: torch.Tensor) -> Iterator[None]:
        """Replay graphs in one training step; the model is restored after it.

        Args:
            example: a tensor like a block's input, [s, b, h].
        """
        replays = self.settle(example)
        self._num_steps += 1
        if not replays:
            yield
            return
        self._make_room(example)
        bound = []
        each = zip(self._numbers, self._blocks, self._eager, self._pools, strict=True)
        for number, block, reason, pools in each:
            if reason is None:
                bound.append(block)
                block.bind(pools)
            else:
                self._say(number, f"{_EAGER}: {reason}")
        try:
            yield
        finally:
            for block in bound:
                block.bind(None)
        if self._count() != self._num_graphs:
            self._complete()
            self.num_captures += 1

    def _count(self) -> int:
        """Pairs of a block and its inputs' shape that were captured, over all slots."""
        pools = dict.fromkeys(self._pools)
        return sum(len(slot.graphs) for each in pools for slot in each.made)

    def _complete(self) -> None:
        """Capture what this step has captured in one slot in all that hold it, and say how many
        slots there are.
        """
        for block, pools in zip(self._blocks, self._pools, strict=True):
            block.complete(pools)
        self._num_graphs = self._count()
        made = [slot for pools in dict.fromkeys(self._pools) for slot in pools.made]
        if len(made) == self._num_said:
            return
        self._num_said = len(made)
        rows, kind = {slot.rows for slot in made}, "chunk activations"
        size = f"{self._pools[0].slot_bytes() / (1 << 20):.0f} MiB"
        if not isinstance(self._blocks[0].part, Whole):
            kind = "activations before experts"
        if len(rows) > 1:
            total = sum(slot.num_bytes for slot in made)
            size = f"{len(rows)} lengths, {total / (1 << 20):.0f} MiB together"
        line = f"CUDA graphs: memory for {self._num_said} {kind} of {size}"
        if torch.cuda.is_available():
            line += f"; {torch.cuda.memory_reserved() / 2**30:.1f} GiB are reserved in all"
        self._log(line)

    def _attends(self, example: torch.Tensor) -> bool:
        """True if attention can be captured for inputs like this one, [s, b, h]."""
        if not self._by_engine:
            return True
        lengths = self._rows or [len(example)]
        kept = [rows for rows in lengths if rows * self._tensor_ranks % self._unit == 0]
        if kept:
            self._rows = kept
            return True
        self._log(
            f"CUDA graphs: not used: cuDNN's attention in Transformer Engine's layers is wrong in "
            f"graphs for {', '.join(str(rows * self._tensor_ranks) for rows in lengths)} rows of a "
            f"sequence, no multiple of {self._unit}"
        )
        return False

    def _make_room(self, example: torch.Tensor) -> None:
        """Make new slots at the start and whenever parameters have moved."""
        addresses = [block.addresses() for block in self._blocks]
        if not self._pools or addresses != self._addresses:
            self._pools.clear()
            if example.is_cuda:
                gc.collect()  # graphs and their slots know each other
                torch.cuda.empty_cache()  # memory of the eager steps
            new = partial(Pools, example.detach(), self._rows, self._most)
            whole = new()
            self._pools = [
                whole if isinstance(block.part, Whole) else new() for block in self._blocks
            ]
            self._addresses, self._num_said, self._num_graphs = addresses, 0, 0


def parts_of(chunk: torch.nn.Module) -> tuple[list[Part], str | None]:
    """The parts of a chunk that can be captured, and the reason why it is not the whole."""
    reason, config, block = why_not_captured(chunk), get_model_config(chunk), decoder_block(chunk)
    if reason is None:
        return [Whole(chunk)], None
    if reason not in reasons_of_experts(config):
        return [], reason
    if config.recompute_granularity is not None:
        return [], f"{reason}; and parts of layers are recomputed"
    if config.fp8 and config.fp8_recipe == "delayed":
        return [], f"{reason}; and delayed scales are counted by the first layer that is run"
    if not all(map(has_own_attention, block.layers)):
        return [], f"{reason}; and layers have another {ATTEND}"
    return [BeforeExperts(chunk, number) for number in range(len(block.layers))], reason


def why_not_captured(chunk: torch.nn.Module) -> str | None:
    """The reason why a chunk cannot be captured; None if it can. Reasons of experts come last."""
    config, block = get_model_config(chunk), decoder_block(chunk)
    if not isinstance(chunk, DistributedDataParallel):
        return f"{type(chunk).__name__} is not megatron-core's DistributedDataParallel"
    if block is None or not len(block.layers):
        return "it has no transformer layers"
    reasons = {
        "some microbatches are recomputed and others are not": (
            config.num_microbatches_with_partial_activation_checkpoints is not None
        ),
        "overlap_param_gather waits inside the layers": (chunk.ddp_config.overlap_param_gather),
        "cuda_graph_impl captures them already": (config.cuda_graph_impl != "none"),
        "activations are offloaded": config.cpu_offloading
        or config.fine_grained_activation_offloading,
    }
    found = _first(reasons) or eight_bit.why_not_in_8_bit(config, block)
    return found or _first(reasons_of_experts(config))


def _first(reasons: Mapping[str, bool]) -> str | None:
    return next((reason for reason, holds in reasons.items() if holds), None)


def reasons_of_experts(config: Any) -> dict[str, bool]:
    """The reasons why experts cannot be captured, and which of them hold.

    Experts with a padded capacity have fixed shapes, and nothing in their forward asks the device
    for a number.
    """
    if not config.num_moe_experts:
        return {}
    return {
        "experts take varying shapes, unless moe_pad_expert_input_to_capacity pads them": (
            not config.moe_pad_expert_input_to_capacity
        ),
        "only the dispatcher alltoall keeps the numbers of tokens off the device": (
            config.moe_token_dispatcher_type != "alltoall"
        ),
        "routers of type sinkhorn and global_aux_loss depend on numbers of the device": (
            routes_by_device(config)
        ),
        "shared experts beside the dispatcher have a stream of their own": (
            config.moe_shared_expert_overlap
        ),
    }
