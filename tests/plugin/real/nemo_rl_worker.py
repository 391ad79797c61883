"""NeMo-RL's Megatron policy worker: log-probabilities, then updates of the policy.

Run by ``run.py``, one process per rank, with NeMo-RL, Megatron-Bridge and Megatron-LM on
PYTHONPATH. The worker's own construction, which imports checkpoints of Hugging Face and starts
Ray, is not run: it gets a model that megatron-core builds here.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.plugin.real import kit
from tests.plugin.real.kit import SIZE

kit.begin(available="nemo_rl", counted="nemo_rl")
kit.stub("megatron.energon", "transformer_engine", "modelopt", "nvidia_resiliency_ext", "vllm",
         "sglang", "nixl", "awscrt", "swanlab", "math_verify", "decord", "nccl", "cuda",
         "mamba_ssm", "causal_conv1d", "fla", "nvdlfw_inspect", "num2words", "plotly", "timm",
         "open_clip", "debugpy", "pynvml", "fastokens", "tensordict_kv", "transfer_queue",
         "soundfile", "mlflow")  # fmt: skip

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from nemo_rl.algorithms.loss.loss_functions import (  # type: ignore[import-not-found]  # noqa: E402
    ClippedPGLossConfig,
    ClippedPGLossFn,
)
from nemo_rl.distributed.batched_data_dict import (  # type: ignore[import-not-found]  # noqa: E402
    BatchedDataDict,
)
from nemo_rl.models.policy.workers import (  # type: ignore[import-not-found]  # noqa: E402
    megatron_policy_worker,
)


def model() -> tuple[Any, Any]:
    """A small Llama on a pipeline of all ranks, and its optimizer, as NeMo-RL sets them."""
    size = int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)
    torch.manual_seed(1234 + int(os.environ["RANK"]))
    model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=SIZE.layers, hidden_size=SIZE.hidden, ffn_hidden_size=SIZE.ffn,
        num_attention_heads=SIZE.heads, num_query_groups=SIZE.groups, normalization="RMSNorm",
        activation_func=F.silu, gated_linear_unit=True, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        moe_token_dispatcher_type="alltoall",
        pipeline_model_parallel_size=size, variable_seq_lengths=True,
        finalize_model_grads_func=finalize_model_grads, calculate_per_token_loss=True,
        **kit.LAYERS,
    )  # fmt: skip
    chunk = GPTModel(
        config, kit.packed_spec(), vocab_size=SIZE.vocabulary,
        max_sequence_length=4 * SIZE.longest,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(), parallel_output=True,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    chunk = chunk.cuda() if kit.ON_GPU else chunk
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
    )
    found = DistributedDataParallel(config, ddp, Float16Module(config, chunk))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, clip_grad=1.0, use_distributed_optimizer=True
        ),
        [found],
    )
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = found.no_sync
    return found, optimizer


CFG: dict[str, Any] = {
    "train_global_batch_size": SIZE.samples // 2, "train_micro_batch_size": 1,
    "logprob_batch_size": 1, "make_sequence_length_divisible_by": 1,
    "sequence_packing": {
        "enabled": True, "algorithm": "modified_first_fit_decreasing", "train_mb_tokens": SIZE.most,
        "logprob_mb_tokens": SIZE.most, "fuse_loss": False,
    },
    "dynamic_batching": {"enabled": False}, "draft": {"enabled": False},
    "megatron_cfg": {
        "tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 1,
        "pipeline_model_parallel_size": int(os.environ["WORLD_SIZE"]),
        "empty_unused_memory_level": 0, "use_fused_linear_logprobs": False,
    },
}  # fmt: skip


def worker() -> Any:
    """NeMo-RL's policy worker around :func:`model`."""
    found = object.__new__(megatron_policy_worker.MegatronPolicyWorkerImpl)
    chunk, optimizer = model()
    scheduler = SimpleNamespace(
        get_lr=lambda group: group["lr"], get_wd=lambda: 0.01, step=lambda **_: None
    )
    own = {
        "cfg": CFG, "model": chunk, "optimizer": optimizer, "scheduler": scheduler,
        "timer": megatron_policy_worker.Timer(), "dp_size": 1, "sampling_params": None,
        "megatron_cfg": SimpleNamespace(optimizer=None, ddp=None),
        "draft_model": None, "defer_fp32_logits": False, "dtype": torch.bfloat16,
        "mcore_state": SimpleNamespace(straggler_timer=None), "delegate_pack_to_model": False,
        "delegate_mtp_loss_mask_to_model": False, "model_slices_context_parallel_inputs": False,
        "media_placeholder_token_id": None, "should_disable_forward_pre_hook": False,
        "_router_replay_enabled": False, "_first_train_step_forward_pre_hook_disabled": False,
    }  # fmt: skip
    for name, value in own.items():
        object.__setattr__(found, name, value)
    kit.STUBBED.add("MegatronPolicyWorkerImpl.__init__")
    if not kit.ON_GPU:
        kit.replace(torch.cuda, "get_device_name", lambda *device: "cpu")
    return found


def batch(seed: int) -> Any:
    """Samples of unlike lengths, padded on the right as NeMo-RL's rollout gives them."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SIZE.vocabulary, (SIZE.samples, SIZE.longest), generator=draw)
    prompts, responses = (torch.tensor(one).unsqueeze(1) for one in SIZE.lengths(seed))
    lengths, place = prompts + responses, torch.arange(SIZE.longest)
    mask = ((place >= prompts) & (place < lengths)).float()
    return BatchedDataDict(
        input_ids=ids * (place < lengths), input_lengths=lengths.squeeze(1), token_mask=mask,
        sample_mask=torch.ones(SIZE.samples),
        advantages=torch.randn(SIZE.samples, 1, generator=draw).expand(-1, SIZE.longest).clone(),
    )  # fmt: skip


def packed(data: Any, batch_size: int | None, most: int) -> Any:
    """This only replica's part, packed as NeMo-RL's ``Policy`` packs it."""
    settings = {
        "algorithm": CFG["sequence_packing"]["algorithm"], "input_key": "input_ids",
        "input_lengths_key": "input_lengths", "sequence_length_pad_multiple": 1,
        "max_tokens_per_microbatch": most,
    }  # fmt: skip
    return data.shard_by_batch_size(1, batch_size=batch_size, sequence_packing_args=settings)


def main() -> None:
    record, policy = kit.Record(), worker()
    record.watch([policy.model])
    record.timed(policy, "get_logprobs", "log-probabilities")
    record.timed(policy, "train", "update")
    loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    for step in range(SIZE.rollouts):
        data = batch(step)
        (sharded,), order = packed(data, None, SIZE.most)
        found = policy.get_logprobs(data=sharded)["logprobs"]
        record.add(f"{step} log-probabilities", found)
        restored = torch.empty_like(found)
        restored[torch.tensor(order)] = found
        for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
            data[name] = restored.clone()
        (sharded,), _ = packed(data, CFG["train_global_batch_size"], SIZE.most)
        metrics = policy.train(sharded, loss)
        record.add(f"{step} loss", metrics["global_loss"])
        record.add(f"{step} norm", metrics["grad_norm"])
        record.add(f"{step} metrics", sorted(metrics["all_mb_metrics"].items()))
        record.weights(f"{step}", [policy.model])
    record.write()


if __name__ == "__main__":
    main()
