"""torchtitan's trainer on two CPU ranks, under its own schedule and, by one changed line, ours.

    python -m tests.torch.titan SOURCES TOKENIZER [--schedule Interleaved1F1B] [--steps 5]

``SOURCES`` is an unpacked wheel of torchtitan (0.2.2, 0.3.0), ``TOKENIZER`` the folder
``tests/assets/tokenizer`` of its repository. Prints how many losses, gradient norms and digests of
all gradients are equal bit by bit. ``docs/torch.md`` says what stands for what a CPU lacks.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.runtime.launcher import REPOSITORY, free_port

RANKS, BEFORE = 2, "    looped_schedule = issubclass("
LINE = "    from megatron.dpp.torch import DynamicSchedule as schedule_class\n"
WORDS = ("model", "pipeline", "rows", "gradient", "of", "the", "a", "stage", "token", "waits")


def lend_cpu() -> None:
    """The functions of a GPU's module that the trainer calls, for ``torch.cpu``."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    lent: dict[str, Any] = {
        "get_device_name": lambda *_: "CPU", "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None, "memory_stats": lambda *_: {}, "set_device": lambda *_: None,
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34),
    }  # fmt: skip
    for name, function in lent.items():
        setattr(torch.cpu, name, function)
    wait = torch.distributed.barrier
    torch.distributed.barrier = lambda *given, **_: wait()


def lend_masks() -> None:
    """FlexAttention has no backward on a CPU: attention with the same masks stands for it."""
    common: Any = importlib.import_module("torchtitan.models.common.attention")

    def attend(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, **_: Any) -> Any:
        places = [torch.arange(n) for n in (q.shape[0], 1, q.shape[2], k.shape[2])]
        mask = block_mask.mask_mod(*torch.meshgrid(*places, indexing="ij"))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        ), None

    common.FlexAttention.compiled_flex_attn = staticmethod(attend)


def lend_microbatches() -> None:
    """PyTorch 2.13 has no ``set_timeout``, and its schedules do not know the ``arg_mbs`` that
    torchtitan 0.3.0 gives.
    """
    from torch.distributed.pipelining import schedules

    torch.distributed.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):

        def step(
            self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any,
            loss_kwargs: Any, return_outputs: bool,
        ) -> None:  # fmt: skip
            for stage in getattr(self, "_stages", None) or [self._stage]:
                stage.has_backward = True
                stage.clear_runtime_states()
            given = arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs
            self._step_microbatches(*given, loss_kwargs=loss_kwargs)

        kind.step = step  # type: ignore[method-assign]


def words_of(options: argparse.Namespace, folder: str) -> list[str]:
    """Settings of the trainer's debug model, in the words of its command line."""
    last: list[str] = []
    given = {
        "training.local-batch-size": 8, "training.seq-len": 128, "training.steps": options.steps,
        "parallelism.pipeline-parallel-degree": RANKS, "metrics.log-freq": 1, "debug.seed": 7,
        "parallelism.pipeline-parallel-schedule": options.schedule, "comm.trace-buf-size": 0,
    }  # fmt: skip
    if version() >= (0, 3):
        words = ["--module", "llama3", "--config", "llama3_debugmodel"]
        words += ["--training.disable-cuda-graphs"]
        last = ["activation-checkpoint:none"]
        given |= {"hf-assets-path": options.tokenizer, "dataloader.dataset-path": folder,
                  "dump-folder": folder}  # fmt: skip
    else:
        words = ["--model.name", "llama3", "--model.flavor", "debugmodel"]
        words += ["--activation-checkpoint.mode", "none", "--training.dataset", "c4_test"]
        given |= {"model.hf-assets-path": options.tokenizer, "training.dataset-path": folder,
                  "job.dump-folder": folder}  # fmt: skip
    for name, value in given.items():
        words += [f"--{name}", str(value)]
    return words + last


def version() -> tuple[int, ...]:
    """The first numbers of torchtitan's version."""
    return tuple(map(int, importlib.metadata.version("torchtitan").split(".")[:2]))


def train(options: argparse.Namespace) -> None:
    """Train on this rank, and write what has to be equal."""
    lend_cpu()
    import torchtitan.distributed.utils as utils
    from torchtitan.config import ConfigManager

    module = "torchtitan.train"
    if version() >= (0, 3):
        lend_masks()
        lend_microbatches()
        module = "torchtitan.trainer"
    kind = importlib.import_module(module).Trainer
    config = ConfigManager().parse_args(words_of(options, str(options.record.parent / "texts")))
    trainer = kind(config)
    lines = [f"{type(trainer.pp_schedule).__name__}"]
    own_step, own_clip = trainer.forward_backward_step, utils.clip_grad_norm_

    def forward_backward_step(**given: Any) -> Any:
        loss = own_step(**given)
        lines.append(f"loss {loss.item().hex()}")
        return loss

    def clip(parameters: Any, *given: Any, **more: Any) -> Any:
        digest = hashlib.sha256()
        for parameter in (kept := list(parameters)):
            gradient = parameter.grad
            plain = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            digest.update(plain.numpy().tobytes())
        norm = own_clip(kept, *given, **more)
        lines.append(f"gradients {digest.hexdigest()[:16]}, norm {norm.item().hex()}")
        return norm

    trainer.forward_backward_step, utils.clip_grad_norm_ = forward_backward_step, clip
    trainer.train()
    trainer.close()
    Path(f"{options.record}.{os.environ['RANK']}").write_text("\n".join(lines))
    torch.distributed.destroy_process_group()


def run(options: argparse.Namespace, folder: Path, *, ours: bool) -> list[list[str]]:
    """Train on all ranks; the lines of each."""
    sources = folder / ("ours" if ours else "own")
    shutil.copytree(options.sources, sources)
    if ours:
        file = sources / "torchtitan/distributed/pipeline_parallel.py"
        text = file.read_text()
        assert text.count(BEFORE) == 1, f"{file} has another form"
        file.write_text(text.replace(BEFORE, LINE + BEFORE))
    paths = f"{sources}:{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {
        "PYTHONPATH": paths, "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HF_HOME": str(folder),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.torch.titan", *sys.argv[1:]]
    command += ["--record", str(record := folder / f"record-{sources.name}")]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(RANKS)
    ]
    try:
        assert not [one.returncode for one in ranks if one.wait(600)], "a rank failed"
    finally:
        for one in ranks:
            one.kill()
    return [Path(f"{record}.{rank}").read_text().splitlines() for rank in range(RANKS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        train(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, draw = Path(temporary), random.Random(1)
        (folder / "texts").mkdir()
        texts = (" ".join(draw.choices(WORDS, k=draw.randint(20, 400))) for _ in range(200))
        rows = "\n".join(json.dumps({"text": text}) for text in texts)
        (folder / "texts/data.json").write_text(rows)
        own, ours = (run(options, folder, ours=ours) for ours in (False, True))
    for rank, (first, second) in enumerate(zip(own, ours, strict=True)):
        assert second[0] == "DynamicSchedule" != first[0], second[0]
        assert first[1:] == second[1:] != [], f"rank {rank}: {first}\n{second}"
    same = sum(len(lines) - 1 for lines in own)
    print(f"{own[0][0]} and {ours[0][0]}: {same} lines of {options.steps} steps are equal")
    print("\n".join(own[-1]))


if __name__ == "__main__":
    main()
