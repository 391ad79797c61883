"""verl's ``TrainingWorker`` on Megatron: log-probabilities, then updates of the policy.

Run by ``run.py``, one process per rank, with verl and Megatron-Bridge on PYTHONPATH.
"""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.plugin.real import kit
from tests.plugin.real.kit import SIZE

kit.begin(counted="verl")
kit.stub("megatron.energon", "transformer_engine", "modelopt", "nvidia_resiliency_ext")
kit.stub("liger_kernel", "datasets", "pandas")

from tensordict import TensorDict  # type: ignore[import-not-found]  # noqa: E402
from verl.trainer.config import CheckpointConfig  # type: ignore[import-not-found]  # noqa: E402
from verl.utils import tensordict_utils as tu  # type: ignore[import-not-found]  # noqa: E402
from verl.workers.config import (  # type: ignore[import-not-found]  # noqa: E402
    ActorConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker  # type: ignore[import-not-found]  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # type: ignore[import-not-found]  # noqa: E402
from verl.workers.utils.padding import (  # type: ignore[import-not-found]  # noqa: E402
    left_right_2_no_padding,
    no_padding_2_padding,
)

BALANCES = not os.environ.get("PLANNED")
"""The host packs microbatches to one size; otherwise they are two rows each, of unlike length."""
PROMPT, RESPONSE = SIZE.longest_prompt, SIZE.longest


def batch(seed: int) -> TensorDict:
    """Prompts padded on the left and responses on the right, as verl's rollout gives them."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SIZE.vocabulary, (SIZE.samples, PROMPT + RESPONSE), generator=draw)
    prompts, responses = (torch.tensor(one).unsqueeze(1) for one in SIZE.lengths(seed))
    place = torch.arange(PROMPT + RESPONSE)
    mask = ((place >= PROMPT - prompts) & (place < PROMPT + responses)).long()
    data = {
        "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "input_ids": ids * mask,
        "attention_mask": mask, "response_mask": mask[:, PROMPT:],
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "advantages": torch.randn(SIZE.samples, RESPONSE, generator=draw),
    }  # fmt: skip
    found = left_right_2_no_padding(TensorDict(data, batch_size=SIZE.samples))
    lengths = found["input_ids"].offsets().diff().tolist()
    tu.assign_non_tensor(found, temperature=1.0, global_token_num=lengths)
    return found


def worker() -> TrainingWorker:
    """An actor on a pipeline of all ranks, of a model with random weights."""
    model = HFModelConfig(
        path=os.environ["MODEL"], load_tokenizer=False, use_remove_padding=True,
        override_config={"attn_implementation": "eager"},
    )  # fmt: skip
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    virtual = int(os.environ.get("CHUNKS", "1"))
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=int(os.environ["WORLD_SIZE"]),
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        use_dynamic_bsz=BALANCES, max_token_len_per_gpu=SIZE.most,
        infer_max_token_len_per_gpu=SIZE.most,
        micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=2,
        override_transformer_config=kit.LAYERS | {"attention_backend": "auto"} | kit.SPEC,
    )  # fmt: skip
    found = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine,
            optimizer_config=McoreOptimizerConfig(
                lr=1e-3, lr_decay_steps=10, total_training_steps=10
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    found.reset()
    return found


def main() -> None:
    record, actor = kit.Record(), worker()
    config = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=BALANCES
    )
    record.watch(actor.engine.module)
    record.timed(actor, "infer_batch", "log-probabilities")
    record.timed(actor, "train_mini_batch", "update")
    actor.set_loss_fn(partial(ppo_loss, config=config))
    for step in range(SIZE.rollouts):
        data = batch(step)
        asked = data.copy()
        tu.assign_non_tensor(asked, calculate_entropy=True, compute_loss=False)
        found: Any = actor.infer_batch(asked)
        old = torch.zeros(SIZE.samples, RESPONSE)
        if found is not None:
            record.add(f"{step} log-probabilities", found["log_probs"])
            record.add(f"{step} entropies", found["entropy"])
            old = no_padding_2_padding(found["log_probs"], data).float()
        torch.distributed.broadcast(old, torch.distributed.get_world_size() - 1)
        data["old_log_probs"] = old
        tu.assign_non_tensor(
            data, calculate_entropy=False, global_batch_size=SIZE.samples // 2,
            mini_batch_size=SIZE.samples // 2, epochs=1, seed=1, compute_loss=True,
            dataloader_kwargs={"shuffle": False},
        )  # fmt: skip
        metrics = actor.train_mini_batch(data)
        if metrics is not None:
            for name, value in sorted(tu.get(metrics, "metrics").items()):
                if "perf" not in name and "mfu" not in name:
                    record.add(f"{step} {name}", value)
        record.weights(f"{step}", actor.engine.module)
    record.write()


if __name__ == "__main__":
    main()
