#!/usr/bin/env python
"""Time a layer's experts as one grouped product and as a loop, and whole steps with both.

    python profiling/bench_experts.py                    # one GPU of 80 GB
    python profiling/bench_experts.py --hidden 64 --ffn 96 --tokens 64 --heads 4 --vocabulary 64

The layer has Mixtral's shape by default: SwiGLU, 8 experts, two per token. The loop is
megatron-core's ``SequentialMLP``, the grouped product ``--moe-grouped-gemm`` of the local layers.
Routers are balanced, or skewed: one expert gets two fifths of the tokens. A whole step is the
forward and backward of four microbatches without the optimizer, on one stage; there the skewed
router sends every token to the first expert, and to another one. Arms take turns.
"""

from __future__ import annotations

import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch

from megatron.dpp.errors import exit_with

ON_GPU = torch.cuda.is_available()

_MICROBATCHES = 4
_SKEWED = (0.40, 0.20, 0.12, 0.10, 0.08, 0.05, 0.03, 0.02)
"""Shares of eight experts; of more, the first has a tenth and the others are alike."""
_PHASES = ("F", "B and W in one", "B", "W")


def _config(args: Namespace, **more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads,
        num_query_groups=max(args.heads // 4, 1), ffn_hidden_size=args.ffn,
        moe_ffn_hidden_size=args.ffn, num_moe_experts=args.experts, moe_router_topk=args.topk,
        moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=0.0, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, hidden_dropout=0.0,
        attention_dropout=0.0, persist_layer_norm=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", **more,
    )  # fmt: skip


def _spec(config: Any, *, grouped: bool) -> Any:
    from megatron.dpp_train.model.layers import block_spec

    return block_spec(config, grouped_experts=grouped)


class _Chunk(torch.nn.Module):
    """A chunk whose one layer is the experts of a layer."""

    def __init__(self, args: Namespace, *, grouped: bool) -> None:
        from megatron.core.transformer.spec_utils import build_module

        super().__init__()
        self.config = _config(args)
        layer = _spec(self.config, grouped=grouped).layer_specs[0].submodules.mlp
        self.experts = build_module(layer, config=self.config, layer_number=1).experts
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([self.experts])
        self.to(device="cuda", dtype=torch.bfloat16)


class _Clock:
    """Adds up the time of phases."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._begin = self._now()

    @staticmethod
    def _now() -> float:
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter()

    def end(self, phase: str) -> None:
        now = self._now()
        self.spent[phase], self._begin = now - self._begin, now


def _counts(args: Namespace, tokens: int, *, skewed: bool) -> torch.Tensor:
    """Tokens of each expert; all of them have ``tokens * args.topk``."""
    total, count = tokens * args.topk, args.experts
    shares: tuple[float, ...] = (1 / count,) * count
    if skewed:
        shares = _SKEWED if count == len(_SKEWED) else (0.1, *((0.9 / (count - 1),) * (count - 1)))
    counts = [int(share * total) for share in shares]
    counts[0] += total - sum(counts)
    return torch.tensor(counts)


def _run_experts(chunk: _Chunk, store: Any, given: tuple[Any, ...]) -> dict[str, float]:
    """Seconds of each phase of one microbatch, with a fused backward and with a split one."""
    inputs, counts, probs, gradient = given
    clock = _Clock()
    output, _ = chunk.experts(inputs, counts, probs)
    clock.end("F")
    output.backward(gradient)
    clock.end("B and W in one")
    chunk.zero_grad(set_to_none=True)
    with store.bound():
        output, _ = chunk.experts(inputs, counts, probs)
        clock.end("")
        with store.collect(0, 0):
            output.backward(gradient)
        clock.end("B")
        store.run(0, 0, 0)
        clock.end("W")
    chunk.zero_grad(set_to_none=True)
    inputs.grad = None
    return clock.spent


def _time_experts(args: Namespace) -> Iterator[tuple[object, ...]]:
    """Rows: tokens, router, phase, ms of the loop and of the grouped product, and their ratio."""
    from megatron.dpp.core.wgrad.linear import WeightGradients

    chunks = {name: _Chunk(args, grouped=name == "grouped") for name in ("loop", "grouped")}
    stores = {name: WeightGradients([chunk]) for name, chunk in chunks.items()}
    for tokens in map(int, args.tokens.split(",")):
        for skewed in (False, True):
            counts = _counts(args, tokens, skewed=skewed)
            shape = (tokens * args.topk, args.hidden)
            options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
            inputs = torch.randn(shape, **options).requires_grad_()
            probs, gradient = torch.ones(shape[0], device="cuda"), torch.randn(shape, **options)
            given = inputs, counts, probs, gradient
            arms = {
                name: partial(_run_experts, chunk, stores[name], given)
                for name, chunk in chunks.items()
            }
            found = harness.take_turns(arms, args.rounds, 5)
            for phase in _PHASES:
                loop, grouped = (
                    statistics.median(one[phase] for one in found[name]) * 1e3 for name in chunks
                )
                router = "skewed" if skewed else "balanced"
                yield tokens, router, phase, *_compared(loop, grouped)


def _compared(loop: float, grouped: float) -> tuple[str, str, str]:
    return f"{loop:.3f}", f"{grouped:.3f}", f"{loop / grouped:.2f}"


class _Model:
    """A GPT of one stage under DDP."""

    def __init__(self, args: Namespace, *, grouped: bool, skewed: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.moe.router import TopKRouter

        config = _config(args)
        config.finalize_model_grads_func = finalize_model_grads
        spec = _spec(config, grouped=grouped)
        self.length = int(args.tokens.split(",")[0])
        model = GPTModel(
            config, spec, args.vocabulary, self.length, position_embedding_type="rope",
        )  # fmt: skip
        model.model_type = 1
        model.cuda().bfloat16()
        for module in model.modules():
            if skewed and isinstance(module, TopKRouter):
                module.expert_bias[0] = 10.0
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.chunk = DistributedDataParallel(config, options, model)
        generator = torch.Generator().manual_seed(7)
        shape = (_MICROBATCHES, 1, self.length + 1)
        self.tokens = torch.randint(0, args.vocabulary, shape, generator=generator).cuda()
        self.places = torch.arange(self.length, device="cuda")[None]

    def _forward(self, iterator: Any, model: Any) -> Any:
        tokens = next(iterator)
        output = model(tokens[:, :-1], self.places, None, labels=tokens[:, 1:])
        return output, lambda losses: (losses.float().mean(), {})

    def step(self, schedule: Callable[..., Any]) -> float:
        """Seconds of one forward and backward of all microbatches."""
        self.chunk.zero_grad_buffer()
        clock = _Clock()
        schedule(
            forward_step_func=self._forward, data_iterator=[iter(self.tokens)],
            model=[self.chunk], num_microbatches=_MICROBATCHES, seq_length=self.length,
            micro_batch_size=1,
        )  # fmt: skip
        clock.end("step")
        return clock.spent["step"]


def _time_steps(args: Namespace) -> Iterator[tuple[object, ...]]:
    """Rows: router, schedule, ms of a step with the loop and with grouped products, the ratio."""
    from megatron.dpp import DppConfig, DppSchedule
    from megatron.dpp.runtime.static import StaticSchedule

    for skewed in (False, True):
        models = {n: _Model(args, grouped=n == "grouped", skewed=skewed) for n in _NAMES}
        # A schedule of its own for each model: it prepares the model at its first call.
        schedules = {
            (kind.__name__, name): kind(DppConfig(), seed=1)
            for kind in (StaticSchedule, DppSchedule)
            for name in models
        }
        arms = {key: partial(models[key[1]].step, schedule) for key, schedule in schedules.items()}
        found = harness.take_turns(arms, args.rounds, 3)
        for kind in ("StaticSchedule", "DppSchedule"):
            loop, grouped = (statistics.median(found[kind, n]) * 1e3 for n in _NAMES)
            name = "static" if kind == "StaticSchedule" else "dynamic, split backward"
            yield "skewed" if skewed else "balanced", name, *_compared(loop, grouped)
        for schedule in schedules.values():
            schedule.close()
        del models, arms, schedules, schedule
        gc.collect()  # DDP's hooks make cycles
        if ON_GPU:
            torch.cuda.empty_cache()


_NAMES = ("loop", "grouped")


def main() -> int:
    """Print both tables."""
    args = harness.new_parser(
        __doc__, experts=8, topk=(2, "experts of a token"), hidden=4096, ffn=14336, heads=32,
        layers=(2, "of the whole step's model"),
        tokens=("4096,8192", "per microbatch; the step takes the first"), vocabulary=32000,
        rounds=5,
    ).parse_args()  # fmt: skip
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    print(f"{device}, PyTorch {torch.__version__}, hidden {args.hidden}, ffn {args.ffn}, "
          f"{args.experts} experts, {args.topk} per token, bf16")  # fmt: skip
    columns = "loop, ms | grouped, ms | loop / grouped"
    with harness.alone(seed=1234):
        harness.print_table(f"tokens | router | phase | {columns}", list(_time_experts(args)))
        gc.collect()
        print(flush=True)
        harness.print_table(f"router | whole step | {columns}", list(_time_steps(args)))
    return 0


if __name__ == "__main__":
    exit_with(main)
