"""The shape of a run: a model, its layout over ranks, its schedule. Times and bytes follow."""

from __future__ import annotations

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
        expert_share: share of the layers that have experts; the others have an MLP. A layer is the
            mean of both kinds.
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
    expert_share: float = 0.0

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
    def layer_weights(self) -> float:
        """Elements of the weight matrices that a token passes in a layer: its multiply-adds."""
        width = self.mean(self.topk * self.expert_width + self.shared_width, self.ffn_hidden_size)
        router = self.mean(self.experts, 0)
        wide = 2 * (self.queries + self.keys) + width * (1 + self.into) + router
        return self.hidden_size * wide

    def mean(self, of_experts: float, of_mlp: float) -> float:
        """The mean over all layers of what those with experts and those with an MLP have."""
        return self.expert_share * of_experts + (1 - self.expert_share) * of_mlp


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """A model, its layout over ranks and its schedule.

    Args:
        layers: transformer layers of each virtual stage, stage ``chunk * pipeline + rank``.
        engine: layers of Transformer Engine, not the local ones.
        adds_gradients: a kernel of its own adds weight gradients to those of the step.
        per_node: ranks of one node.
        element_bytes: of a parameter and of an activation, 4 in fp32, else 2.
        gradient_bytes: of an element of the gradient buffer.
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
    micro_batch: int = 1
    num_microbatches: int = 1
    element_bytes: int = 2
    gradient_bytes: int = 4
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
    def expert_replicas(self) -> int:
        """Ranks that reduce the gradient of an expert between them."""
        return self.tensor * self.replicas // (self.expert * self.expert_tensor)

    def on_a_node(self, size: int, stride: int) -> int:
        """The ranks that a node has of a group of ``size`` ranks ``stride`` apart. Tensor-parallel
        ranks are neighbours, then come replicas, then the stages of a pipeline."""
        return max(1, min(size, self.per_node // stride))

    # Numbers of a microbatch

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
    def global_tokens(self) -> int:
        """Tokens of an iteration."""
        return self.global_batch * self.model.seq_length

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
