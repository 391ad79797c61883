"""Data types of a run: the model, its schedule, and how both are cut over ranks.

A :class:`RunShape` holds all that memory, time and traffic depend on. ``from_flags.py`` makes it of
training's flags; the rest of the package reads no flags.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections import Counter
from dataclasses import dataclass

from megatron.dpp.schedule import in_bytes
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.pipeline_model import PipelineModel
from megatron.dpp.sim.weighing import NO_ROOM, Choice, weigh_fixed, why_needed
from megatron.dpp.slice_sizes import slice_size


@dataclass(frozen=True)
class LayerLayout:
    """``layers[s]`` transformer layers on virtual stage ``s`` (``chunk * num_ranks + rank``). The
    first stage also has the embedding, the last the head.
    """

    num_ranks: int
    layers: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        """Virtual stages of a rank."""
        return len(self.layers) // self.num_ranks

    def rank_layers(self, rank: int) -> int:
        """Layers of all chunks of ``rank``."""
        return sum(self.layers[rank :: self.num_ranks])

    def text(self) -> str:
        """The layout as ``--pipeline-model-parallel-layout`` takes it.

        >>> LayerLayout(2, (1, 3, 2, 0)).text()
        'Et|ttt|tt|L'
        """
        stages = ["t" * count for count in self.layers]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
        return "|".join(stages)


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of each layer.

    Args:
        number: ``--num-experts``.
        topk: experts that a token passes.
        ffn_hidden_size: width of one expert's MLP.
        shared: width of the MLP that every token passes besides; 0 without one.
    """

    number: int
    topk: int
    ffn_hidden_size: int
    shared: int = 0

    @property
    def active_width(self) -> int:
        """Width of all MLPs that a token passes."""
        return self.topk * self.ffn_hidden_size + self.shared


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One transformer, named as Megatron's flags name it. The defaults are those of GPT-2.

    Args:
        vocab_size: rows of the embedding, padding included.
        num_positions: rows of the learned position embedding; 0 without one.
        gated: the MLP has three weight matrices instead of two.
        rotary: queries and keys are rotated, so both versions are kept.
        norm_vectors: parameters of a norm over the hidden size: 2 for LayerNorm, 1 for RMSNorm.
        flash: attention keeps no s*s matrices.
        fused_loss: ``--cross-entropy-loss-fusion``.
        experts: in the place of a layer's MLP; None without them.
        dense: numbers of the layers that have an MLP all the same, from 0.
        qk_norm: queries and keys of a head are normalised.
        qk_norm_over_heads: those of all heads together.
        softmax_offsets: each head has one more, learned logit.
        layer_norms: norms of a layer over the hidden size.
    """

    hidden_size: int
    seq_length: int
    vocab_size: int
    num_heads: int
    num_groups: int
    head_size: int
    ffn_hidden_size: int
    arch: str = "gpt"
    gated: bool = False
    num_positions: int = 0
    rotary: bool = False
    tied: bool = True
    linear_bias: bool = True
    qkv_bias: bool = False
    norm_vectors: int = 2
    binary_head: bool = False
    flash: bool = True
    fused_loss: bool = False
    hidden_dropout: bool = False
    attention_dropout: bool = False
    experts: ExpertShape | None = None
    dense: tuple[int, ...] = ()
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    layer_norms: int = 2
    softmax_offsets: bool = False

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.num_heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all groups' keys; the values are as wide."""
        return self.num_groups * self.head_size

    @property
    def ffn_inputs(self) -> int:
        """Width of what the MLP's first linear layer puts out."""
        return self.ffn_hidden_size * (2 if self.gated else 1)

    @property
    def active_width(self) -> int:
        """Width of all MLPs of a layer that a token passes, with experts if there are any."""
        return self.ffn_hidden_size if self.experts is None else self.experts.active_width

    def layer_weights(self, ffn_hidden_size: int | None = None) -> int:
        """Elements of a layer's weight matrices: multiply-adds per token of its linear layers.

        Args:
            ffn_hidden_size: width of the MLP in place of what a token passes.
        """
        width = self.active_width if ffn_hidden_size is None else ffn_hidden_size
        attention = self.hidden_size * (2 * self.queries + 2 * self.keys)
        return attention + self.hidden_size * width * (3 if self.gated else 2)

    @property
    def length_costs(self) -> LengthCosts:
        """Times of a stage over the lengths of sequences, by a layer's FLOPs."""
        return LengthCosts.of_layer(self.layer_weights(), self.queries)


@dataclass(frozen=True, kw_only=True)
class RunSchedule:
    """A run's pipeline schedule. The default is Megatron's static one.

    Args:
        dynamic: ``--use-dpp``, whose ``policy`` may be Megatron's own order.
        split_backward: weight gradients are tasks of their own.
        cuda_graphs: ``--dpp-cuda-graphs``; ``off`` where chunks cannot be captured, whatever is
            recomputed or sharded.
        head_in_forward: F runs the backward of LM head and loss.
        slice_tokens: ``--dpp-slice-tokens``.
        head_when_cut: it would, if sequences were cut.
        holds_whole: memory holds whole sequences; otherwise ``auto`` always cuts.
    """

    dynamic: bool = False
    policy: str = "megatron"
    cap: str = "megatron"
    split_backward: bool = False
    cuda_graphs: str = "off"
    head_in_forward: bool = False
    slice_tokens: str = "off"
    head_when_cut: bool = False
    holds_whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of each number that a run keeps.

    Args:
        element: of a parameter and of an activation, 4 in fp32, else 2.
        gradient: of an element of the gradient buffer.
        moments: that the optimizer keeps of a parameter beside its fp32 copy.
        copies: of a layer's parameter, in 8 bit beside the parameter.
        eight_bit: the matrix products of layers are in 8 bit.
    """

    element: int = 2
    gradient: int = 4
    moments: int = 8
    copies: int = 0
    eight_bit: bool = False


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """A model, its layout over ranks and its schedule.

    Args:
        layers: transformer layers of each virtual stage, stage ``chunk * pipeline + rank``.
        engine: layers of Transformer Engine, not the local ones.
        adds_gradients: a kernel of its own adds weight gradients to those of the step.
        gathers_keys: each context-parallel rank keeps the keys and values of all, as the local
            layers do.
        per_node: ranks of one node.
        mapped: ``--use-tp-pp-dp-mapping``: the pipeline's stages are nearer than the replicas.
        shard: what data-parallel ranks share: ``none``, ``optimizer`` (ZeRO stage 1),
            ``gradients`` (2) or ``parameters`` (3).
        instances: groups of replicas that share an optimizer each, with ``optimizer``.
        recompute: ``none``, ``selective`` (attention's core) or ``full``.
        expert, expert_tensor: ranks that share a layer's experts, and one expert.
        imbalance: tokens of the fullest rank's experts over those of the average rank.
        begin, row: of a slice, which is the run of a shorter sequence: its first token, and the
            tokens of the whole sequence; 0 without slices.
    """

    model: ModelShape
    layers: tuple[int, ...]
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    engine: bool = False
    adds_gradients: bool = False
    gathers_keys: bool = False
    sequence_parallel: bool = False
    per_node: int = 8
    mapped: bool = False
    micro_batch: int = 1
    num_microbatches: int = 1
    precision: Precision = Precision()
    shard: str = "none"
    instances: int = 1
    recompute: str = "none"
    recompute_num_layers: int = 1
    schedule: RunSchedule = RunSchedule()
    expert: int = 1
    expert_tensor: int = 1
    imbalance: float = 1.0
    begin: int = 0
    row: int = 0

    @property
    def graphs(self) -> str:
        """Capture of chunks: ``on``, ``off``, or ``auto`` where times decide."""
        asked = self.schedule.cuda_graphs
        if self.shard in ("gradients", "parameters"):
            return "off"
        never = not self.schedule.dynamic or self.recompute == "full"
        return "off" if asked == "auto" and never else asked

    @functools.cached_property
    def slices(self) -> list[RunShape]:
        """The units of a microbatch: its slices, each a run of its tokens alone, or itself."""
        return [self.slice(number) for number in range(self.num_slices)]

    @property
    def num_slices(self) -> int:
        """Units of a microbatch; 1 where it is not cut."""
        return -(-self.model.seq_length // self._slice_size)

    def slice(self, number: int) -> RunShape:
        """The shape of slice ``number`` of a microbatch."""
        length, each = self.model.seq_length, self._slice_size
        if each == length:
            return self
        begin = number * each
        model = dataclasses.replace(self.model, seq_length=min(each, length - begin), flash=True)
        return dataclasses.replace(self, model=model, begin=begin, row=length)

    @functools.cached_property
    def _slice_size(self) -> int:
        """Tokens of a slice, as training cuts sequences of one length; all where it cuts none."""
        length, schedule = self.model.seq_length, self.schedule
        if self.row or not schedule.dynamic or schedule.slice_tokens == "off":
            return length
        multiple = self.tensor if self.sequence_parallel else 1
        tokens = (
            self.weighed.tokens if schedule.slice_tokens == "auto" else int(schedule.slice_tokens)
        )
        return slice_size(length, tokens, multiple) if tokens else length

    @property
    def weighed(self) -> Choice:
        """The choice of ``--dpp-slice-tokens auto`` in a dynamic schedule."""
        schedule = self.schedule
        return weigh_fixed(
            PipelineModel(
                num_ranks=self.pipeline, num_chunks=self.chunks, longest=self.model.seq_length,
                policy=schedule.policy, cap="auto" if in_bytes(schedule.cap) else schedule.cap,
                split_backward=schedule.split_backward, costs=self.model.length_costs,
            ),
            self.model.seq_length, self.num_microbatches, rows=self.micro_batch,
            multiple=self.tensor if self.sequence_parallel else 1,
            needed=why_needed(schedule.cap) if schedule.holds_whole else NO_ROOM,
        )  # fmt: skip

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(self.layers)

    @property
    def dense_layers(self) -> list[int]:
        """Layers of each virtual stage without experts, in a model with them."""
        ends = list(itertools.accumulate(self.layers))
        stages = [bisect.bisect(ends, layer) for layer in self.model.dense]
        return [stages.count(stage) for stage in range(len(ends))]

    @functools.cached_property
    def kinds(self) -> list[tuple[RunShape, int]]:
        """The run with layers of one kind alone, and how many the model has: those with experts, if
        there are any, first."""
        dense = len(self.model.dense)
        if not dense:
            return [(self, self.num_layers)]
        one = dataclasses.replace(self, model=dataclasses.replace(self.model, dense=()))
        other = dataclasses.replace(one.model, experts=None)
        return [(one, self.num_layers - dense), (dataclasses.replace(one, model=other), dense)]

    @property
    def chunks(self) -> int:
        """Virtual stages of a pipeline rank."""
        return self.layout.num_chunks

    @property
    def layout(self) -> LayerLayout:
        """The stages as the planner takes them."""
        return LayerLayout(self.pipeline, self.layers)

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def replicas(self) -> int:
        """Ranks that reduce a gradient between them."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that reduce the gradient of an expert between them."""
        return self.tensor * self.replicas // (self.expert * self.expert_tensor)

    @property
    def expert_sharers(self) -> int:
        """Ranks that share the optimizer's state of an expert."""
        return max(1, self.expert_replicas * self.sharers // self.replicas)

    @property
    def routed(self) -> float:
        """Tokens that the experts of the fullest rank take of one microbatch of every rank."""
        experts = self.model.experts
        if experts is None:
            return 0.0
        return self.imbalance * experts.topk * self.tokens / self.tensor * self.expert_tensor

    @property
    def experts_per_node(self) -> int:
        """Fewest ranks of an expert group on one node; it lies across replicas."""
        return self._on_a_node(self.expert * self.expert_tensor, 1)

    @property
    def context_per_node(self) -> int:
        """Fewest ranks of a context-parallel group on one node."""
        return self._on_a_node(self.context, self.tensor)

    @property
    def sharers(self) -> int:
        """Ranks that share an optimizer's state."""
        if self.shard == "optimizer":
            return self.replicas // self.instances
        return 1 if self.shard == "none" else self.replicas

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter and of an activation."""
        return self.precision.element

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient. Sharded gradients have the parameters' type."""
        sharded = self.shard in ("gradients", "parameters")
        return self.precision.element if sharded else self.precision.gradient

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.micro_batch * self.model.seq_length // self.context

    @property
    def global_batch(self) -> int:
        """Samples of an iteration."""
        return self.micro_batch * self.num_microbatches * self.data

    @property
    def elements(self) -> int:
        """Elements of a microbatch's hidden state on a rank that holds all of it: s*b*h."""
        return self.tokens * self.model.hidden_size

    @property
    def outside(self) -> float:
        """Elements of the hidden state outside of tensor-parallel regions; sequence parallelism
        shards them."""
        return self.elements / (self.tensor if self.sequence_parallel else 1)

    @property
    def tensor_per_node(self) -> int:
        """Fewest ranks of a tensor-parallel group on one node."""
        return self._on_a_node(self.tensor, 1)

    @property
    def replicas_per_node(self) -> int:
        """Fewest ranks of a gradient-reducing group on one node."""
        inner = self.tensor * (self.pipeline if self.mapped else 1)
        return self._on_a_node(self.replicas, inner)

    @property
    def pipeline_per_node(self) -> int:
        """Fewest stages of a pipeline on one node; megatron-core lays it across nodes last."""
        inner = self.tensor * self.context * (1 if self.mapped else self.data)
        return self._on_a_node(self.pipeline, inner)

    def _on_a_node(self, size: int, stride: int) -> int:
        """The fewest ranks that a node has of any group of ``size`` ranks ``stride`` apart. Where
        groups do not lie evenly on nodes, the slowest group sets the pace.
        """
        node, block = self.per_node, size * stride
        whole = node % stride == 0 and (node % block == 0 or block % node == 0)
        if whole or stride % node == 0:  # nearly always, and ``auto`` asks thousands of times
            return max(1, min(size, node // stride))
        starts = range(0, self.world_size, block)
        firsts = {(start + lane) % node for start in starts for lane in range(stride)}
        members = range(0, block, stride)
        return min(
            count
            for first in firsts
            for count in Counter((first + each) // node for each in members).values()
        )
