"""Fine-tune a Hugging Face model with LoRA on a pipeline, without Megatron.

    torchrun --nproc-per-node 2 examples/torch_lora.py [--model FOLDER] [--steps 20]

Without a model a tiny Llama with random weights learns a sequence, on a CPU in a minute. Rows have
unlike lengths and are not padded. Needs torch, transformers and peft.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron.dpp.torch import DynamicSchedule

LAYERS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def model_of(folder: str | None) -> Any:
    """A causal model with LoRA, the same on all ranks."""
    torch.manual_seed(1)
    if folder is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
    else:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(config)
    lora = peft.LoraConfig(r=8, target_modules=list(LAYERS), task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


class Stage(nn.Module):
    """Consecutive layers of a model; the embedding before the first, the head behind the last."""

    def __init__(self, model: Any, index: int, number: int) -> None:
        super().__init__()
        whole = model.get_base_model()
        every = len(whole.model.layers)
        self.layers = whole.model.layers[every * index // number : every * (index + 1) // number]
        self.rotary = whole.model.rotary_emb
        self.embedding = whole.model.embed_tokens if index == 0 else None
        last = index == number - 1
        self.head = nn.Sequential(whole.model.norm, whole.lm_head) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, position_ids=positions)
        return x if self.head is None else self.head(x)


def rows(number: int, draw: random.Random) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of unlike length that count on, and what follows each token of them."""
    found = []
    for _ in range(number):
        start, length = draw.randrange(256), draw.randint(16, 256)
        found.append(torch.arange(start, start + length + 1).unsqueeze(0) % 256)
    return [row[:, :-1] for row in found], [row[:, 1:] for row in found]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a row."""
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder of a Llama-like model (default: a tiny random one)")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    stage = Stage(model_of(options.model), rank, size).to(device)
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = DynamicSchedule(PipelineStage(stage, rank, size, device), 8, loss_fn)
    draw = random.Random(1)
    for step in range(options.steps):
        tokens, targets = rows(8, draw)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([[row.to(device) for row in tokens]] if rank == 0 else []),
            target=[row.to(device) for row in targets] if rank == size - 1 else None,
            losses=losses,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        if losses and (step % 5 == 4 or step == 0):
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.3f}", flush=True)
    schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
