"""Train a small GPT twice from the same weights, statically and dynamically; compare bit by bit.

Run by test_equality.py and others, one process per rank: equality_worker.py JSON, a list of cases.
Each case names its layout and settings; the process groups are rebuilt between cases, so that one
start of Python serves many of them. Prints ``CASE name ok``, or fails with the first difference.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.dpp.core import cpu

SUPPORT = cpu.install() if not torch.cuda.is_available() else None

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

from megatron.dpp import DppConfig, DppSchedule, plugin  # noqa: E402
from megatron.dpp.core.compat import replaced  # noqa: E402
from megatron.dpp.core.graphs.reductions import Reductions  # noqa: E402
from megatron.dpp.runtime.static import StaticSchedule  # noqa: E402
from megatron.dpp.trace import NullRecorder, Recorder, TraceLayout, open_recorder  # noqa: E402
from tests.runtime import layers  # noqa: E402
from tests.runtime.layers import block_spec, packed_params, positions, prediction_spec  # noqa: E402
from tests.runtime.losses import (  # noqa: E402
    OwnLoss,
    Rerun,
    loss_func,
    token_loss,
)

VOCABULARY, SEQUENCE, HIDDEN, MICRO_BATCH = 64, 16, 32, 2
LOG = "megatron.dpp.runtime.base.logger.info"
DOCUMENTS = 3
"""Documents of a packed microbatch, of at most SEQUENCE * MICRO_BATCH tokens together."""


def own_part(tokens: torch.Tensor) -> torch.Tensor:
    """This context-parallel rank's part of a sequence [b, s]."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return tokens
    return layers.own_part(tokens.t(), parallel_state.get_context_parallel_group()).t()


def build(case: dict[str, Any]) -> tuple[list[Any], Any]:
    """Model chunks under DDP, and their optimizer, as the training layer builds them."""
    v = case.get("v", 1)
    if case.get("fusion"):
        sys.path.append(str(Path(__file__).parents[2] / "profiling"))
        import fused_products

        fused_products.provide()
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    config = TransformerConfig(
        num_layers=case.get("layers", max(4, case["p"] * v)),
        hidden_size=case.get("hidden", HIDDEN), num_attention_heads=4,
        pipeline_model_parallel_size=case["p"], tensor_model_parallel_size=case.get("tp", 1),
        expert_model_parallel_size=case.get("ep", 1), expert_tensor_parallel_size=case.get("etp"),
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
        context_parallel_size=case.get("cp", 1),
        sequence_parallel=case.get("sp", False), pipeline_dtype=dtype, params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=case.get("dropout", 0.0), attention_dropout=case.get("dropout", 0.0),
        deallocate_pipeline_outputs=True, persist_layer_norm=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=case.get("fusion", False), bias_dropout_fusion=False,
        overlap_p2p_comm=v > 1, batch_p2p_comm=v == 1,
        calculate_per_token_loss=case.get("per_token", False),
        num_microbatches_with_partial_activation_checkpoints=case.get("partial"),
        **recomputed(case), **case.get("model", {}),
    )  # fmt: skip
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.get("bf16", False),  # as Megatron-LM sets it
        overlap_grad_reduce=case.get("overlap", False),
        use_distributed_optimizer=case.get("distributed_optimizer", False),
        num_distributed_optimizer_instances=case.get("instances", 1),
        bucket_size=case.get("bucket_size"),
        overlap_param_gather=case.get("gather", False),
        fp8_param_gather=bool(config.fp8_param),
    )
    chunks = [build_chunk(case, config, ddp_config, chunk) for chunk in range(v)]
    if case.get("bare"):
        return chunks, None
    connected = case.get("overlap") and case.get("no_sync", True)
    config.no_sync_func = [c.no_sync for c in chunks] if connected else None
    if config.no_sync_func and v == 1:
        config.no_sync_func = config.no_sync_func[0]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, clip_grad=1.0, weight_decay=0.1,
            bf16=dtype == torch.bfloat16, params_dtype=dtype,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
        ),
        chunks,
    )  # fmt: skip
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def recomputed(case: dict[str, Any]) -> dict[str, Any]:
    """Recomputation settings of a case; "some" recomputes the first layer of each chunk."""
    how = case.get("recompute")
    settings: dict[str, Any] = {"recompute_granularity": "full" if how == "some" else how}
    if how in ("full", "some"):
        settings |= {"recompute_method": "uniform" if how == "full" else "block"}
        settings |= {"recompute_num_layers": 1}
    return settings


def build_chunk(case: dict[str, Any], config: Any, ddp_config: Any, chunk: int) -> Any:
    """One model chunk under DDP."""
    stage = chunk if case.get("v", 1) > 1 else None
    pre = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    post = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    own = {"spec": case.get("spec", "torch"), "vp_stage": stage}
    if own["spec"] == "host":  # layers that a host builds, of every version of megatron-core
        block: Any = get_gpt_layer_local_spec()
    else:
        block = block_spec(config, **own)
    model = GPTModel(
        config, block, VOCABULARY, SEQUENCE, pre_process=pre, post_process=post, vp_stage=stage,
        share_embeddings_and_output_weights=not case.get("untied"),
        position_embedding_type=case.get(
            "positions", "none" if config.mtp_num_layers else "learned_absolute"
        ),
        mtp_block_spec=None if own["spec"] == "host" else prediction_spec(config, **own),
    )  # fmt: skip
    model.model_type = 1
    for module in model.modules():
        if case.get("skewed") and isinstance(module, TopKRouter):
            module.expert_bias[0] = 10.0  # every token goes to the first expert
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.get("frozen", ())))
    if SUPPORT is None:
        model.cuda()
    if config.bf16:
        model = Float16Module(config, model)
    if case.get("bare"):  # a host without megatron-core's wrapper
        return model
    wrapped = DistributedDataParallel(config, ddp_config, model, disable_bucketing=chunk > 0)
    wrapped.force_all_reduce = case.get("everywhere", False)
    return wrapped


def drawn(case: dict[str, Any]) -> torch.Generator:
    """Random numbers of microbatches, the same for every stage of a pipeline."""
    replica = 0 if case.get("same_data") else parallel_state.get_data_parallel_rank()
    return torch.Generator().manual_seed(17 + replica)


def batches(case: dict[str, Any]) -> Any:
    """Endless microbatches."""
    generator = drawn(case)
    while True:
        length = SEQUENCE
        if case.get("lengths"):  # of one microbatch; half of them have the longest
            length = min(SEQUENCE, int(torch.randint(1, 2 * SEQUENCE, (), generator=generator)))
        unit = 2 if case.get("tp", 1) > 1 else 1
        if case.get("cp", 1) > 1:
            unit = 2 * case["cp"]
        length = max(unit, length // unit * unit)
        yield torch.randint(0, VOCABULARY, (MICRO_BATCH, length + 1), generator=generator)


def next_sizes(iterators: list[Any], m: int) -> list[int]:
    """Tokens of the next ``m`` microbatches, which stay to be read."""
    coming = [next(iterators[0]) for _ in range(m)]
    iterators[0] = itertools.chain(coming, iterators[0])
    return [each.shape[0] * (each.shape[1] - 1) for each in coming]


def documents(case: dict[str, Any]) -> Any:
    """Endless microbatches of :data:`DOCUMENTS` documents each, packed or one by one."""
    generator, cut = drawn(case), 2 * case.get("multiple", case.get("cp", 1))
    while True:
        lengths = torch.randint(1, 11, (DOCUMENTS,), generator=generator).tolist()
        if case.get("tp", 1) > 1:
            lengths = [length + length % 2 for length in lengths]
        if cut > 2:  # the row alone must have a length that context-parallel ranks can cut
            lengths[-1] += -sum(lengths) % cut
        found = [torch.randint(0, VOCABULARY, (1, n + 1), generator=generator) for n in lengths]
        if case["packed"] == "one by one":
            yield from ([document] for document in found)
        else:
            yield found


class ForwardStep:
    """Records for each training forward if it recomputes all activations."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.per_token = case.get("per_token", False)
        self.told: list[bool | None] = []
        self.own_loss = OwnLoss() if case.get("own_loss") else None

    def __call__(self, iterator: Any, model: Any, all_again: bool | None = None) -> Any:
        if model.training:
            self.told.append(all_again)
        if all_again is not None:
            config = get_model_config(model)
            config.recompute_granularity = "full" if all_again else None
            config.recompute_method = "uniform" if all_again else None
            config.recompute_num_layers = 1 if all_again else None
        tokens = next(iterator)
        if isinstance(tokens, list):
            return self.packed(model, tokens)
        tokens = tokens.cuda()
        inputs, labels = own_part(tokens[:, :-1]), own_part(tokens[:, 1:])
        every = torch.arange(tokens.shape[1] - 1, device="cuda").expand(MICRO_BATCH, -1)
        if self.own_loss is not None:
            loss = self.own_loss if model.training else OwnLoss()  # an evaluation keeps graphs
            return model(inputs, every, None), partial(loss, labels)
        output = model(inputs, own_part(every), None, labels=labels)
        if self.per_token:  # another number in each microbatch
            return output, partial(token_loss, labels % 3 > 0)
        return output, loss_func

    def packed(self, model: Any, found: list[torch.Tensor]) -> Any:
        """A microbatch of several documents, or of one without packing."""
        inputs, labels = (
            torch.cat([document[:, part] for document in found], dim=1).cuda()
            for part in (slice(None, -1), slice(1, None))
        )
        if len(found) == 1:
            places = torch.arange(inputs.shape[1], device="cuda")[None]
            output = model(inputs, places, None, labels=labels)
        else:
            lengths = torch.tensor([0] + [document.shape[1] - 1 for document in found])
            starts = lengths.cumsum(0).int().cuda()
            places = positions(starts, inputs.shape[1])[None]
            params = packed_params(starts, int(lengths.max()))
            inputs, places, labels = map(own_part, (inputs, places, labels))
            output = model(inputs, places, None, labels=labels, packed_seq_params=params)
        return output, partial(token_loss, labels >= 0)


def train(case: dict[str, Any], schedule: Any) -> dict[str, Any]:
    """Runs two optimizer steps, and an evaluation after them or after each.

    Returns everything that must be bitwise equal.
    """
    iterations = case.get("iterations", 2)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        case["v"] if case.get("v", 1) > 1 else None
    )
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    chunks, optimizer = build(case)
    iterators = [documents(case) if "packed" in case else batches(case) for _ in chunks]
    losses, norms, sums, gradients, out_of_order = [], [], [], [], 0
    forward_step = ForwardStep(case)
    steps = [False, True] * iterations if case.get("between") else [False] * iterations + [True]
    for evaluating in steps:
        for chunk in chunks:
            chunk.zero_grad_buffer()
            chunk.train(not evaluating)
        optimizer.zero_grad()
        if case.get("announce"):
            case["announce"](next_sizes(iterators, case["m"]))
        recorder = getattr(schedule, "recorder", None)  # a host's schedule has none
        if recorder is not None and not evaluating:
            recorder.begin_iteration(len(norms))
        out = schedule(
            forward_step_func=forward_step, data_iterator=iterators, model=chunks,
            num_microbatches=case["m"], seq_length=SEQUENCE, forward_only=evaluating,
            micro_batch_size=case.get("micro_batch", MICRO_BATCH),
            force_all_reduce=case.get("everywhere", False),
        )  # fmt: skip
        if case.get("everywhere") and not evaluating:
            check_reduced_everywhere(chunks)
        losses += [entry["lm loss"].item() for entry in out]
        sums += [entry["sum"].item() for entry in out if "sum" in entry]
        if not gradients:
            gradients += [b.grad_data.clone() for chunk in chunks for b in chunk.buffers]
        if not evaluating:
            out_of_order += getattr(schedule, "num_out_of_order", 0)
            _, norm, _ = optimizer.step()
            if recorder is not None:
                recorder.end_iteration()
            norms.append(norm)
    weights = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    logits = forward_step.own_loss.most_before if forward_step.own_loss else 0
    return {"losses": losses, "norms": norms, "weights": weights, "told": forward_step.told,
            "out of order": out_of_order, "sums": sums, "gradients": gradients,
            "logits": logits}  # fmt: skip


def check_reduced_everywhere(chunks: list[Any]) -> None:
    """Every replica has all of the gradients, not only what its optimizer needs."""
    for chunk in chunks:
        own = chunk.buffers[0].grad_data
        replicas = parallel_state.get_data_parallel_group()
        first = own.clone()
        dist.broadcast(first, dist.get_global_rank(replicas, 0), group=replicas)
        assert torch.equal(own, first), "replicas have different gradients"


def compare(expected: dict[str, Any], got: dict[str, Any], what: str) -> None:
    for name in ("losses", "norms", "told"):
        assert expected[name] == got[name], f"{what}: {name} {expected[name]} != {got[name]}"
    for index, (one, other) in enumerate(zip(expected["weights"], got["weights"], strict=True)):
        worst = (one - other).abs().max().item()
        assert torch.equal(one, other), f"{what}: parameter {index} differs by up to {worst}"


def compare_unpacked(case: dict[str, Any], packed: dict[str, Any]) -> None:
    """The first step has the losses and gradients of the same documents without packing: to fp32's
    rounding, or with a relative error of the whole below a case's own bound.
    """
    alone = case | {"packed": "one by one", "m": DOCUMENTS * case["m"], "iterations": 1}
    with StaticSchedule(DppConfig(), seed=1234) as schedule:
        expected = train(alone, schedule)
    m, bound = case["m"], case.get("rounding")
    close = partial(torch.testing.assert_close, rtol=bound or 1e-5, atol=1e-6)
    close(float(sum(packed["sums"][:m])), float(sum(expected["sums"][: DOCUMENTS * m])))
    for got, wanted in zip(packed["gradients"], expected["gradients"], strict=True):
        assert wanted.abs().max() > 1e-3
        if bound is None:
            close(got, wanted)
        else:
            error = ((got - wanted).float().norm() / wanted.float().norm()).item()
            assert error < bound, f"{case['name']}: packing changes gradients by {error:.2g}"


def compare_uncut(case: dict[str, Any], cut: dict[str, Any]) -> None:
    """The first step has the losses and gradients of sequences that no ranks share. Leaves the
    process groups of such a layout.
    """
    sums = torch.tensor(cut["sums"][: case["m"]])
    dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    alone = case | {"cp": 1, "multiple": case["cp"], "same_data": True, "iterations": 1}
    parallel_state.destroy_model_parallel()
    initialize(alone)
    with StaticSchedule(DppConfig(), seed=1234) as schedule:
        expected = train(alone, schedule)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(sums, torch.tensor(expected["sums"][: case["m"]]))
    for got, wanted in zip(cut["gradients"], expected["gradients"], strict=True):
        assert wanted.abs().max() > 1e-3
        close(got, wanted)


def initialize(case: dict[str, Any]) -> None:
    """Make the process groups of a case's layout."""
    metrics = getattr(moe_utils, "get_moe_metrics_tracker", None)  # 0.19 has another
    kept: Any = metrics().metrics if metrics else moe_utils.get_moe_layer_wise_logging_tracker()
    kept.clear()  # its tensors are as long as a case's model
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.get("tp", 1), pipeline_model_parallel_size=case["p"],
        virtual_pipeline_model_parallel_size=case["v"] if case.get("v", 1) > 1 else None,
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("etp"),
        context_parallel_size=case.get("cp", 1),
        num_distributed_optimizer_instances=case.get("instances", 1),
    )  # fmt: skip


def recorder_of(case: dict[str, Any], directory: str | None, schedule: str) -> Recorder:
    """The trace of a run, if a directory is given."""
    if directory is None:
        return NullRecorder()
    state = parallel_state
    layout = TraceLayout(
        data=state.get_data_parallel_rank(), data_size=state.get_data_parallel_world_size(),
        pipeline=state.get_pipeline_model_parallel_rank(), pipeline_size=case["p"],
        tensor=state.get_tensor_model_parallel_rank(), tensor_size=case.get("tp", 1),
        num_chunks=case.get("v", 1), schedule=schedule,
    )  # fmt: skip
    return open_recorder(directory, rank=dist.get_rank(), layout=layout)


def run_case(case: dict[str, Any]) -> None:
    initialize(case)
    plain = DppConfig(transport=case.get("expected_over", "auto"), **case.get("config", {}))
    with StaticSchedule(plain, seed=1234) as schedule:
        expected = train(case, schedule)
    assert all(map(torch.isfinite, map(torch.tensor, expected["losses"])))
    if "partial" in case and parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        assert set(expected["told"]) == {True, False}
    if "packed" in case and not case.get("dropout") and case.get("cp", 1) == 1:
        compare_unpacked(case, expected)
    deviated = 0
    for settings in case["runs"]:
        static = settings.pop("static", False)
        settings = {"policy": "dynamic"} | case.get("config", {}) | settings  # auto is megatron
        kind: Any = StaticSchedule if static else DppSchedule
        trace = recorder_of(case, settings.pop("trace", None), "pp" if static else "dpp")
        host = settings.pop("host", None)
        most_logits = settings.pop("most_logits", None)
        replays: list[Rerun] = []
        if settings.get("cuda_graphs") == "on" and SUPPORT is not None:
            kind = partial(kind, capture=partial(Rerun, replays=replays))
        said: list[str] = []
        with (
            begun_by_replays() as begun,
            trace,
            hosted(DppConfig(**settings), said)
            if host
            else kind(
                DppConfig(**settings), seed=1234, log=said.append, recorder=trace
            ) as schedule,
        ):
            told = {"announce": plugin.announce} if host == "announces" else {}
            got = train(case | told, schedule)
        if case.get("bucket_size"):
            assert begun, f"{case['name']} with {settings}: no replay began a reduction"
            assert SUPPORT is not None or all(begun), "a reduction waited for a replay's end"
        if settings.get("cuda_graphs") == "on":
            captured = replays or "CUDA graphs: memory for" in "".join(said)
            assert captured, f"{case['name']} with {settings}: nothing was replayed"
        compare(expected, got, f"{case['name']} with {settings}")
        if most_logits is not None and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            assert got["logits"] == most_logits, (
                f"{case['name']} with {settings}: logits of {got['logits']} kept"
            )
        moved = [0] * dist.get_world_size()
        dist.all_gather_object(moved, got["out of order"])
        deviated += any(moved)
    assert deviated >= case.get("deviates", 0), f"{case['name']}: {deviated} runs deviated"
    if case.get("uncut"):
        compare_uncut(case, expected)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        order = f"{deviated} not in Megatron's order"
        print(f"CASE {case['name']} ok: {len(case['runs'])} runs, {order}", flush=True)


@contextlib.contextmanager
def hosted(config: DppConfig, said: list[str]) -> Iterator[Any]:
    """The schedule that a host fetches from megatron-core while the plugin is installed."""
    with mock.patch(LOG, said.append), plugin.installed(config, strict=True):
        yield schedules.get_forward_backward_func()


@contextlib.contextmanager
def begun_by_replays() -> Iterator[list[bool]]:
    """For each reduction that a replayed backward starts: True if it has a stream of its own."""
    begun: list[bool] = []

    def reduce(original: Any, *args: Any, **options: Any) -> None:
        aside = SUPPORT is None and torch.cuda.current_stream() != torch.cuda.default_stream()
        begun.append(aside)
        original(*args, **options)

    def begin(original: Any, *args: Any) -> None:
        with replaced(_ParamAndGradBucketGroup, "start_grad_sync", reduce):
            original(*args)

    with replaced(Reductions, "start", begin):
        yield begun


def start() -> None:
    """Join the other ranks, with deterministic kernels on GPUs."""
    if SUPPORT is None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl" if SUPPORT is None else "gloo")


def main() -> None:
    start()
    for case in json.loads(sys.argv[1]):
        run_case(copy.deepcopy(case))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
