"""Settings of megatron-core that the dynamic pipeline leaves to megatron-core's own schedule."""

from __future__ import annotations

_LONG_SEQUENCES = "a long sequence is divided by context_parallel_size, on all replicas alike"
_LAYERS_WAIT = "the weight gradients of layers of all kinds can wait"
ORDERED: dict[str, tuple[object, str]] = {
    "overlap_moe_expert_parallel_comm": (
        False,
        "experts' communication is not hidden behind another microbatch, and weight gradients fill "
        "the gaps of the pipeline instead",
    ),
    "moe_paged_stash": (False, "experts' activations are kept without a stash"),
    "hybrid_context_parallel": (False, _LONG_SEQUENCES),
    "dynamic_context_parallel": (False, _LONG_SEQUENCES),
    "max_seqlen_per_dp_cp_rank": (None, _LONG_SEQUENCES),
    "defer_embedding_wgrad_compute": (
        False,
        "a split backward defers the weight gradients of all layers, the embedding's too",
    ),
    "delay_wgrad_compute": (False, _LAYERS_WAIT),
    "overlap_dispatch_backward_with_experts_wgrad": (False, _LAYERS_WAIT),
    "cuda_graph_impl": ("none", "cuda_graphs captures the dynamic pipeline's tasks"),
}
"""Settings whose bookkeeping needs megatron-core's own order of tasks: the values that do not, and
the state of things without them.
"""

UNSUPPORTED = {
    "moe_paged_stash": False,
    "moe_expert_rank_capacity_factor": None,
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
}
"""Options of megatron-core, some of newer versions, with the value that can be honoured."""
