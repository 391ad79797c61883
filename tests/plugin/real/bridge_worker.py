"""Megatron-Bridge's ``pretrain``, with evaluations, and ``finetune`` of packed documents.

Run by ``run.py``, one process per rank, with Megatron-Bridge and Megatron-LM on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.plugin.real import kit
from tests.plugin.real.kit import SIZE

kit.begin(  # writers of checkpoints import this module, too
    available="megatron.bridge", counted="megatron.bridge", connect=__name__ == "__main__"
)
kit.stub("megatron.energon", "transformer_engine", "modelopt", "nvidia_resiliency_ext", "mamba_ssm",
         "causal_conv1d", "fla", "nvdlfw_inspect", "bitsandbytes")  # fmt: skip

from megatron.bridge.data.builders import (  # type: ignore[import-not-found]  # noqa: E402
    DirectHFSFTDatasetConfig,
    HFDatasetSourceConfig,
    PromptCompletionSFTPreprocessingConfig,
)
from megatron.bridge.models.gpt_provider import (  # type: ignore[import-not-found]  # noqa: E402
    GPTModelProvider,
)
from megatron.bridge.training import callbacks  # type: ignore[import-not-found]  # noqa: E402
from megatron.bridge.training import eval as evaluation  # noqa: E402
from megatron.bridge.training import train as training  # noqa: E402
from megatron.bridge.training.config import (  # type: ignore[import-not-found]  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune  # type: ignore[import-not-found]  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # type: ignore[import-not-found]  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # type: ignore[import-not-found]  # noqa: E402

ITERATIONS = max(2 * SIZE.rollouts, 3)
FOLDER = Path(os.environ["RECORD"]).parent


def config(folder: Path, dataset: Any, **checkpoint: Any) -> Any:
    """A run of a small Llama on a pipeline of all ranks."""
    virtual = int(os.environ.get("CHUNKS", "1"))
    model = GPTModelProvider(
        num_layers=SIZE.layers, hidden_size=SIZE.hidden, ffn_hidden_size=SIZE.ffn,
        num_attention_heads=SIZE.heads, num_query_groups=SIZE.groups, normalization="RMSNorm",
        activation_func=F.silu, gated_linear_unit=True, add_bias_linear=False,
        position_embedding_type="rope", attention_dropout=0.0, hidden_dropout=0.0,
        seq_length=SIZE.longest, vocab_size=SIZE.vocabulary,
        share_embeddings_and_output_weights=False, bf16=True, pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_size=int(os.environ["WORLD_SIZE"]),
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        # Megatron's condition for chunks on two ranks, between which a batch would mix messages
        overlap_p2p_comm=virtual > 1, batch_p2p_comm=virtual == 1,
        moe_token_dispatcher_type="alltoall", **kit.LAYERS, **kit.SPEC,
    )  # fmt: skip
    return ConfigContainer(
        model=model,
        train=TrainingConfig(
            train_iters=ITERATIONS, global_batch_size=SIZE.samples // 2, micro_batch_size=1
        ),
        validation=ValidationConfig(eval_interval=2, eval_iters=1),
        optimizer=OptimizerConfig(
            optimizer="adam", bf16=True, lr=3e-3, min_lr=1e-6, clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            start_weight_decay=0.01, end_weight_decay=0.01, weight_decay_incr_style="constant",
            lr_warmup_iters=1, lr_decay_iters=10, lr_decay_style="cosine",
            override_opt_param_scheduler=True,
        ),
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True,
            use_distributed_optimizer=True,
        ),
        dist=DistributedInitConfig(distributed_backend="nccl" if kit.ON_GPU else "gloo"),
        dataset=dataset,
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=SIZE.vocabulary),
        checkpoint=CheckpointConfig(
            save=str(folder), save_interval=ITERATIONS, save_optim=not kit.TIMED, **checkpoint
        ),
        rng=RNGConfig(seed=1234),
    )  # fmt: skip


def recorded(record: kit.Record, name: str) -> Any:
    """Callbacks that add each step's numbers and evaluation."""
    found = callbacks.CallbackManager()

    def start(context: Any) -> None:
        record.watch(context.model)

    def step(context: Any) -> None:
        record.add(f"{name} losses", context.loss_dict)
        record.add(f"{name} norm", context.grad_norm)
        record.weights(name, context.model)

    found.register("on_train_start", start)
    found.register("on_train_step_end", step)
    found.register("on_eval_end", lambda context: record.add("eval", context.total_loss_dict))
    return found


def documents() -> str:
    """A file of prompts and answers of unlike lengths, as numbers."""
    draw = torch.Generator().manual_seed(3)
    path = FOLDER / f"documents.{os.environ['RANK']}.jsonl"
    with path.open("w") as file:
        for seed in range(ITERATIONS // 2 + 1):
            for prompt, answer in zip(*SIZE.lengths(seed), strict=True):
                ids = torch.randint(1, SIZE.vocabulary, (prompt + answer,), generator=draw).tolist()
                texts = [" ".join(map(str, part)) for part in (ids[:prompt], ids[prompt:])]
                line = dict(zip(("input", "output"), texts, strict=True))
                file.write(json.dumps(line) + "\n")
    return str(path)


def main() -> None:
    name = "get_tensor_shapes_adjust_fn_for_distillation"
    for module in (training, evaluation):
        kit.replace(module, name, lambda *given, **_: None)
    record, saved = kit.Record(), FOLDER / "pretrained"
    record.timed(training, "train_step", "update")
    mock = MockGPTDatasetConfig(
        random_seed=1234, reset_attention_mask=False, reset_position_ids=False,
        eod_mask_loss=False, seq_length=SIZE.longest, num_dataset_builder_threads=1,
        data_sharding=True, dataloader_type="single", num_workers=0, persistent_workers=False,
    )  # fmt: skip
    pretrain(config(saved, mock), forward_step, recorded(record, "pretrain"))
    packed = DirectHFSFTDatasetConfig(
        seq_length=SIZE.longest,
        source=HFDatasetSourceConfig(
            path_or_dataset="json", load_kwargs={"data_files": {"train": documents()}}
        ),
        preprocessing=PromptCompletionSFTPreprocessingConfig(
            prompt_column="input", completion_column="output"
        ),
        do_validation=False, do_test=False, enable_in_batch_packing=True, pad_to_multiple_of=1,
        num_workers=0, persistent_workers=False,
    )  # fmt: skip
    more = config(FOLDER / "finetuned", packed, pretrained_checkpoint=str(saved))
    more.train.micro_batch_size, more.validation.eval_iters = 2, 0
    finetune(more, forward_step, recorded(record, "finetune"))
    record.write()


if __name__ == "__main__":
    main()
