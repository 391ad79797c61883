"""The shape of a run: a model, its layout over ranks, its schedule. Times and bytes follow."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Model:
    """One transformer, named as Megatron's flags name it.

    Args:
        vocab_size: rows of the embedding, padding included.
        num_positions: rows of the learned position embedding; 0 without one.
        gated: the MLP has three weight matrices instead of two.
        norm_vectors: parameters of a norm over the hidden size: 2 for LayerNorm, 1 for RMSNorm.
        flash: attention keeps no s*s matrices.
        experts: of each layer, in the place of its MLP; 0 without them.
        topk: experts that a token passes.
        expert_width: width of one expert's MLP.
        shared_width: width of the MLP that every token passes beside its experts.
        dense: numbers of the layers that have an MLP all the same, from 0.
        softmax_offsets: each head has one more, learned logit.
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
    qk_norm: bool = False
    softmax_offsets: bool = False
    experts: int = 0
    topk: int = 0
    expert_width: int = 0
    shared_width: int = 0
    dense: tuple[int, ...] = ()

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.num_heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all groups' keys; the values are as wide."""
        return self.num_groups * self.head_size

    @property
    def into(self) -> int:
        """Matrices of the MLP's first linear layer."""
        return 2 if self.gated else 1

    @property
    def layer_weights(self) -> int:
        """Elements of the weight matrices that a token passes in a layer: its multiply-adds."""
        width = self.ffn_hidden_size
        if self.experts:
            width = self.topk * self.expert_width + self.shared_width
        attention = self.hidden_size * 2 * (self.queries + self.keys)
        return attention + self.hidden_size * width * (1 + self.into)

    @property
    def core_products(self) -> int:
        """Multiply-adds per token of attention's core under a causal mask; without a mask there are
        twice as many."""
        return self.seq_length * self.queries


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """A model, its layout over ranks and its schedule.

    Args:
        layers: transformer layers of each virtual stage, stage ``chunk * pipeline + rank``.
        engine: layers of Transformer Engine, not the local ones.
        adds_gradients: a kernel of its own adds weight gradients to those of the step.
        per_node: ranks of one node.
        mapped: ``--use-tp-pp-dp-mapping``: the pipeline's stages are nearer than the replicas.
        element_bytes: of a parameter and of an activation, 4 in fp32, else 2.
        buffer_bytes: of an element of the gradient buffer.
        moment_bytes: that the optimizer keeps of a parameter beside its fp32 copy.
        copy_bytes: of a layer's parameter, in 8 bit beside the parameter.
        shard: what data-parallel ranks share: ``none``, ``optimizer`` (ZeRO stage 1),
            ``gradients`` (2) or ``parameters`` (3).
        recompute: ``none``, ``selective`` (attention's core) or ``full``.
        expert, expert_tensor: ranks that share a layer's experts, and one expert.
        dynamic: ``--use-dpp``; otherwise the schedule is Megatron's static one.
        split: weight gradients are tasks of their own.
        graphs: CUDA graphs: ``on``, ``off``, or ``auto`` where times decide.
        head_in_forward: F runs the backward of LM head and loss.
    """

    model: Model
    layers: tuple[int, ...]
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    engine: bool = False
    adds_gradients: bool = False
    sequence_parallel: bool = False
    per_node: int = 8
    mapped: bool = False
    micro_batch: int = 1
    num_microbatches: int = 1
    element_bytes: int = 2
    buffer_bytes: int = 4
    moment_bytes: int = 8
    copy_bytes: int = 0
    shard: str = "none"
    recompute: str = "none"
    recompute_num_layers: int = 1
    expert: int = 1
    expert_tensor: int = 1
    dynamic: bool = False
    policy: str = "megatron"
    cap: str = "megatron"
    split: bool = False
    graphs: str = "off"
    head_in_forward: bool = False

    # Layers

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(self.layers)

    @property
    def chunks(self) -> int:
        """Virtual stages of a pipeline rank."""
        return len(self.layers) // self.pipeline

    def rank_layers(self, rank: int) -> int:
        """Layers of all chunks of a pipeline rank."""
        return sum(self.layers[rank :: self.pipeline])

    @functools.cached_property
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
        other = dataclasses.replace(one.model, experts=0)
        return [(one, self.num_layers - dense), (dataclasses.replace(one, model=other), dense)]

    # Ranks

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that reduce a gradient between them."""
        return self.data * self.context

    @property
    def sharers(self) -> int:
        """Ranks that share an optimizer's state."""
        return 1 if self.shard == "none" else self.replicas

    @property
    def expert_replicas(self) -> int:
        """Ranks that reduce the gradient of an expert between them."""
        return self.tensor * self.replicas // (self.expert * self.expert_tensor)

    @property
    def expert_sharers(self) -> int:
        """Ranks that share the optimizer's state of an expert."""
        return 1 if self.shard == "none" else self.expert_replicas

    def on_a_node(self, size: int, stride: int) -> int:
        """The fewest ranks that a node has of any group of ``size`` ranks ``stride`` apart. Where
        groups do not lie evenly on nodes, the slowest group sets the pace.
        """
        node, block = self.per_node, size * stride
        whole = node % stride == 0 and (node % block == 0 or block % node == 0)
        if whole or stride % node == 0:
            return max(1, min(size, node // stride))
        starts = range(0, self.world_size, block)
        firsts = {(start + lane) % node for start in starts for lane in range(stride)}
        return min(
            count
            for first in firsts
            for count in Counter((first + i) // node for i in range(0, block, stride)).values()
        )

    @property
    def replicas_per_node(self) -> int:
        """Fewest ranks of a gradient-reducing group on one node."""
        return self.on_a_node(self.replicas, self.tensor * (self.pipeline if self.mapped else 1))

    @property
    def pipeline_per_node(self) -> int:
        """Fewest stages of a pipeline on one node; megatron-core lays it across nodes last."""
        inner = self.tensor * self.context * (1 if self.mapped else self.data)
        return self.on_a_node(self.pipeline, inner)

    # Numbers of a microbatch

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient. Sharded gradients have the parameters' type."""
        sharded = self.shard in ("gradients", "parameters")
        return self.element_bytes if sharded else self.buffer_bytes

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.micro_batch * self.model.seq_length // self.context

    @property
    def routed(self) -> float:
        """Tokens that a rank's experts take of one microbatch of every rank, if all take alike."""
        return self.model.topk * self.tokens / self.tensor * self.expert_tensor

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
    def logits(self) -> float:
        """Logits of a microbatch on one tensor-parallel rank."""
        return self.tokens * self.model.vocab_size / self.tensor
