"""The formulas against the papers', against each other, and against the rest of the project."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp_train.cost.device import Device, cpu_device, gpu_device
from megatron.dpp_train.cost.estimate import bubble_formula, estimate, least_seconds, traffic
from megatron.dpp_train.cost.flops import (
    flops_of_lengths,
    flops_per_iteration,
    flops_per_token,
    head_share,
)
from megatron.dpp_train.cost.from_flags import shape_of
from megatron.dpp_train.cost.memory import (
    interleaving_factor,
    layer_bytes,
    least_bytes,
    model_parameters,
    published_layer_bytes,
    rank_memory,
    rank_parameters,
    stage_bytes,
)
from megatron.dpp_train.cost.shape import ModelShape, RunSchedule, RunShape
from megatron.dpp_train.cost.text import lines
from megatron.dpp_train.cost.times import collective_bytes, collectives, device_times, part_times
from megatron.dpp_train.launch.estimate_command import main
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate

FLAGS = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --lr 1e-3 "
    "--max-position-embeddings 128 --micro-batch-size 2 --train-iters 1 --eval-iters 0 "
    "--transformer-impl local --mock-data --padded-vocab-size 1024 --bf16 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 "
)
H200 = gpu_device("NVIDIA H200", 141 * 2**30)


def shape(flags: str = "", world_size: int = 1, on_gpu: bool = True, **changes: Any) -> RunShape:
    """The shape of a small run with some of it changed."""
    args = validate(parse_args((FLAGS + flags).split()), world_size)
    return dataclasses.replace(shape_of(args, on_gpu=on_gpu), **changes)


def even_device() -> Device:
    """Nothing but matrix products takes time on it."""
    return dataclasses.replace(
        H200,
        bytes_per_second=1e30,
        link=1e30,
        network=1e30,
        collective=0.0,
        launch=0.0,
        between=0.0,
        flops=1e12,
    )


def test_published_formulas() -> None:
    model = ModelShape(
        hidden_size=12288, seq_length=2048, vocab_size=51200, num_heads=96, num_groups=96,
        head_size=128, ffn_hidden_size=4 * 12288, flash=False,
    )  # fmt: skip
    plain = RunShape(model=model, layers=(96,))
    unit = 2048 * 12288
    matrix = 5 * 96 * 2048 / 12288

    def found(**changes: Any) -> float:
        return published_layer_bytes(dataclasses.replace(plain, **changes))

    assert found() == pytest.approx(unit * (34 + matrix))
    assert found(tensor=8) == pytest.approx(unit * (10 + 24 / 8 + matrix / 8))
    assert found(tensor=8, sequence_parallel=True) == pytest.approx(found() / 8)
    selective = found(tensor=8, sequence_parallel=True, recompute="selective")
    assert selective == pytest.approx(34 * unit / 8)
    assert found(tensor=8, recompute="full") == 2 * unit
    assert found(tensor=8, recompute="full", sequence_parallel=True) == 2 * unit / 8
    assert interleaving_factor(8, 1) == 1
    assert interleaving_factor(8, 3) == 1 + 7 / 24


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 4"])
@pytest.mark.parametrize("recompute", ["", "--recompute-activations"])
def test_a_layer_with_dropout_keeps_what_the_paper_says(flags: str, recompute: str) -> None:
    ours = shape(f"{flags} {recompute}", world_size=4, on_gpu=False)
    published = published_layer_bytes(ours)
    # The paper leaves the norms' statistics out: 16 bytes a token.
    assert layer_bytes(ours) == pytest.approx(published + 16 * ours.tokens)


def test_sequence_parallel_shares_everything_out() -> None:
    alone = shape()
    shared = shape("--tensor-model-parallel-size 4 --sequence-parallel", world_size=4)
    assert layer_bytes(shared) == pytest.approx(layer_bytes(alone) / 4)


def test_full_recompute_keeps_the_input_only() -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    assert layer_bytes(shape(full)) == 2 * 2 * 128 * 256 / 2


def test_flops_are_those_that_training_logs() -> None:
    experts = "--num-experts 8 --moe-ffn-hidden-size 96 --disable-bias-linear --swiglu"
    for flags in ("", "--swiglu", "--group-query-attention --num-query-groups 2", experts):
        args = validate(parse_args((FLAGS + flags).split()), 1)
        run = shape_of(args, on_gpu=True)
        assert estimate(run, H200).flops_per_token == flops_per_iteration(args, 4) / (4 * 128)


def test_the_head_is_a_share_of_the_layers_of_another_rank() -> None:
    """By their products. Fewer layers on the last rank make up for it, and measured times, the
    means of all ranks, do not tell it."""

    def share(flags: str = "", pipeline: int = 4) -> float:
        more = f"--pipeline-model-parallel-size {pipeline} "
        return head_share(validate(parse_args((FLAGS + more + flags).split()), pipeline))

    layer, head = 4 * 256 * 256 + 2 * 256 * 1024, 256 * 1024
    assert share() == pytest.approx(head / (2 * layer))
    assert share("--num-layers 4") == pytest.approx(head / layer) == pytest.approx(1 / 3)
    assert share("--padded-vocab-size 2048") == pytest.approx(2 * share())
    last = "--decoder-last-pipeline-num-layers {} --pipeline-model-parallel-size 2"
    assert share(last.format(2)) == 0.0
    assert share(last.format(5)) == pytest.approx((5 + 1 / 3) / 3 - 1)
    assert share(pipeline=1) == 0.0
    measured: Any = parse_args((FLAGS + "--pipeline-model-parallel-size 4").split())
    measured.length_costs = "costs.json"
    assert head_share(measured) == 0.0


EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --disable-bias-linear "
    "--no-bias-gelu-fusion --moe-token-dispatcher-type alltoall"
)


def test_expert_parallel_ranks_share_experts_and_send_tokens() -> None:
    alone = shape(EXPERTS, world_size=8)
    shared = shape(f"{EXPERTS} --expert-model-parallel-size 4", world_size=8)
    dense = rank_parameters(shape(), 0) - 8 * 2 * 1024 * 256
    of_experts = 8 * 8 * 2 * 96 * 256
    bias = 8 * (3 * 256 + 256 + 1024 + 256)
    router = 8 * 8 * 256
    assert rank_parameters(alone, 0) == dense - bias + router + of_experts
    assert rank_parameters(shared, 0) == dense - bias + router + of_experts // 4
    assert model_parameters(shared) == rank_parameters(alone, 0)
    assert traffic(alone).experts == 0
    # Two all-to-alls in F and in B; a rank keeps a quarter of its 2 * 256 routed tokens.
    sent = 8 * shared.num_microbatches * 4 * 3 / 4 * 2 * 256 * 256 * 2
    assert traffic(shared).experts == sent
    assert shared.expert_replicas == 2 and alone.expert_replicas == 8


def test_a_router_out_of_balance_costs_time_and_memory() -> None:
    even = shape(f"{EXPERTS} --expert-model-parallel-size 4", world_size=8)
    skewed = dataclasses.replace(even, imbalance=2.0)
    assert estimate(skewed, even_device()).seconds > estimate(even, even_device()).seconds
    assert layer_bytes(skewed) > layer_bytes(even)
    assert traffic(skewed).experts == 2 * traffic(even).experts


def test_context_parallel_ranks_pass_keys_and_values_round() -> None:
    alone = dataclasses.replace(shape(), data=1)
    ring = dataclasses.replace(alone, context=4, gathers_keys=False)
    assert traffic(alone).context == 0
    # Of the 64 tokens of a rank, to three others: in F keys and values, in B also their gradients.
    assert traffic(ring).context == 8 * ring.num_microbatches * 3 * 3 * 2 * 64 * 256 * 2
    assert least_bytes(ring) < least_bytes(alone)
    gathered = dataclasses.replace(ring, gathers_keys=True)
    assert traffic(gathered).context == traffic(ring).context * 2 / 3
    again = dataclasses.replace(gathered, recompute="selective")
    assert traffic(again).context == traffic(ring).context
    # A ring passes beside the products of attention, a gather comes before them.
    device = dataclasses.replace(even_device(), link=1e11)
    assert estimate(gathered, device).seconds > estimate(ring, device).seconds


def test_flops_of_experts_are_those_of_the_layers_that_hold_them() -> None:
    args = parse_args(
        (
            FLAGS + "--num-experts 4 --moe-layer-freq 2 --moe-router-topk 2 "
            "--moe-ffn-hidden-size 384 --mtp-num-layers 1 --disable-bias-linear "
            "--position-embedding-type rope"
        ).split()
    )
    args = validate(args, 1)
    model = ModelShape(
        hidden_size=256, seq_length=128, vocab_size=1024, num_heads=8, num_groups=8, head_size=32,
        ffn_hidden_size=1024,
    )  # fmt: skip
    # The further layer is like the last, which is dense; it has a head and joints of its own.
    widths = [2 * 384, 1024] * 4 + [1024]
    outputs = 2 * 1024 + 2 * 256 + 3
    per_token = flops_per_token(model, widths, outputs=outputs)
    assert flops_per_iteration(args, 4) == 4 * 128 * per_token
    assert flops_of_lengths(args, 4 * 128, 4 * 128**2) == pytest.approx(4 * 128 * per_token)
    less = flops_of_lengths(args, 4 * 128, 8 * 64**2)
    assert 0 < less < 4 * 128 * per_token


@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_ranks_hold_the_model_between_them(pipeline: int) -> None:
    whole = shape("--untie-embeddings-and-output-weights")
    layers = (whole.num_layers // pipeline,) * pipeline
    cut = dataclasses.replace(whole, pipeline=pipeline, layers=layers)
    parts = sum(rank_parameters(cut, rank) for rank in range(pipeline))
    assert parts == model_parameters(whole) == model_parameters(cut)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_even_static_stages_have_the_bubble_of_the_formula(chunks: int, microbatches: int) -> None:
    run = shape(pipeline=4, layers=(2,) * 4 * chunks, num_microbatches=microbatches, data=1)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=0))
    found = estimate(run, even_device())
    formula = bubble_formula(run)
    assert formula == 3 / (chunks * microbatches)
    assert found.bubble == pytest.approx(formula / (1 + formula), abs=1e-6)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_static_schedules_first_rank_holds_what_the_paper_says(chunks: int) -> None:
    run = shape(pipeline=4, layers=(2,) * 4 * chunks, num_microbatches=16, data=1)
    found = estimate(run, even_device()).ranks[0].activations
    layers = 2 * 4 * chunks
    expected = layers * layer_bytes(run) * interleaving_factor(4, chunks)
    assert found == pytest.approx(expected)


def test_state_bytes_of_each_kind_of_sharding() -> None:
    count = model_parameters(shape())
    expected = {
        "none": 18 * count,
        "optimizer": 6 * count + 12 * count / 4,
        "parameters": (2 + 2 + 12) * count / 4,
    }
    flags = {
        "none": "",
        "optimizer": "--use-distributed-optimizer",
        "parameters": "--use-torch-fsdp2",
    }
    for shard, total in expected.items():
        found = estimate(shape(flags[shard], world_size=4), H200)
        assert found.shape.shard == shard
        assert found.ranks[0].state == pytest.approx(total)


def test_the_optimizer_that_runs_is_counted_and_by_those_who_share_it() -> None:
    """The state is that of the optimizer in use, divided among the replicas that shard it."""
    count = model_parameters(shape())
    for flags, moments in (
        ("", 8),
        ("--optimizer sgd", 4),
        ("--optimizer sgd --sgd-momentum 0", 0),
    ):
        found = estimate(shape(flags, world_size=4), H200)
        assert found.ranks[0].optimizer == (4 + moments) * count
    args = validate(parse_args((FLAGS + "--use-distributed-optimizer").split()), 8)
    # validate lets it pass with einops only
    args = args.with_(num_distributed_optimizer_instances=4)
    run = shape_of(args, on_gpu=True)
    assert estimate(run, H200).ranks[0].optimizer == 12 * count / 2
    # Gradients are reduced within a pair and then summed over the four, weights gathered by two.
    each = count / 2
    assert traffic(run).data == pytest.approx(4 * each + 4 * 2 * 3 / 4 * each + 2 * each)


@settings(max_examples=25)
@given(
    micro=st.integers(1, 4),
    pipeline=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
    dynamic=st.booleans(),
)
def test_more_work_never_costs_less(micro: int, pipeline: int, chunks: int, dynamic: bool) -> None:
    chunks = chunks if pipeline > 1 else 1
    stages = pipeline * chunks
    run = shape(
        pipeline=pipeline,
        layers=(8 // stages,) * stages,
        micro_batch=micro,
        num_microbatches=2 * pipeline,
        schedule=RunSchedule(dynamic=True, policy="dynamic", cap="auto", split_backward=True)
        if dynamic
        else RunSchedule(),
    )
    small, large = (
        estimate(each, H200) for each in (run, dataclasses.replace(run, micro_batch=micro + 1))
    )
    assert large.peak_bytes > small.peak_bytes
    assert large.seconds >= small.seconds
    assert 0 <= small.bubble < 1
    assert least_bytes(run) <= small.peak_bytes
    assert stage_bytes(run, 0) > 0
    assert lines(small)


def test_layouts_are_read_as_megatron_core_deals_layers_out() -> None:
    text = "--pipeline-model-parallel-size 2 --use-dpp --pipeline-model-parallel-layout "
    assert shape(f"{text} Et*3|(tt|)*2,tL", 2).layers == (3, 2, 2, 1)
    uneven = "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 "
    assert shape(uneven + "--decoder-last-pipeline-num-layers 1", 4).layers == (1, 3, 3, 1)
    standalone = "--pipeline-model-parallel-size 2 --num-layers 6 "
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert shape(standalone + both, 2).layers == (3, 3)


def test_dense_layers_beside_experts_cost_what_theirs_do() -> None:
    words = f"{EXPERTS} --expert-model-parallel-size 2 --moe-layer-freq"
    none, half, all_of_them = (
        estimate(shape(f"{words} {each}", 2), H200) for each in ("[0]*8", "2", "1")
    )
    for name in ("parameters", "flops_per_token"):
        both = getattr(none, name) + getattr(all_of_them, name)
        assert getattr(half, name) == both / 2, name
    assert none.traffic.experts == 0 < 2 * half.traffic.experts == all_of_them.traffic.experts
    times = [device_times(each.shape, H200).layer for each in (none, half, all_of_them)]
    mean = [(first + last) / 2 for first, last in zip(times[0], times[2], strict=True)]
    assert times[1] == pytest.approx(mean) and times[1] != pytest.approx(times[0])
    fsdp = f"{EXPERTS} --bf16 --use-torch-fsdp2 --moe-layer-freq"
    experts, first = (
        rank_memory(shape(f"{fsdp} {each}", 2), 0, 0.0) for each in ("1", "[0]+[1]*7")
    )
    larger = first.parameters - experts.parameters  # three of the larger layer, 16 bits each
    assert first.workspace - experts.workspace == 3 * 2 * larger > 0


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--ranks 8 --gpu H100 --num-layers 24 --hidden-size 1024 --num-attention-heads 16"
    assert main(f"{words} --seq-length 1024 --bf16".split()) == 0
    out = capsys.readouterr().out
    assert "354,871,296" in out
    assert "data 8 = 8 ranks" in out
    assert main([*words.split(), "--seq-length", "1024", "--tensor-model-parallel-size", "5"]) == 2
    assert "8 processes cannot hold" in capsys.readouterr().err


def test_the_command_line_estimates_what_training_would_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def out(words: str, status: int = 0) -> str:
        model = "--gpu H100 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --bf16 "
        assert main((model + words).split()) == status
        text = capsys.readouterr()
        return text.err if status else text.out

    assert "1 microbatch of 8" in out("--seq-length=1024 --micro-batch-size=8")
    assert "354,871,296" in out("--seq-length 1024 --no-create-attention-mask-in-dataloader")
    null = "--seq-length 1024 --tokenizer-type NullTokenizer --vocab-size 999"
    assert f"{354_871_296 - (50304 - 1024) * 1024:,}" in out(null)
    assert out("", 2) == "megatron-dpp estimate: error: --seq-length is required\n"
    pipeline = "--seq-length 1024 --ranks 2 --pipeline-model-parallel-size 2 --use-dpp "
    assert "layers  " not in out(pipeline)
    planned = out(pipeline + "--dpp-plan shapes --global-batch-size 16").splitlines()
    counts = planned[2].partition(": ")[2].replace(", then", "").split()
    assert planned[2].startswith("layers  ")
    assert sum(map(int, counts)) == 24
    assert sum(map(int, counts[::2])) > 12  # the head is on the last rank
    assert "expected one of" in out(pipeline + "--dpp-policy none", 2)


def test_what_spans_nodes_travels_over_the_network() -> None:
    def run(tensor: int, pipeline: int, data: int, **changes: Any) -> RunShape:
        layers = (8 // pipeline,) * pipeline
        changes = {"per_node": 8, "num_microbatches": 8, **changes}
        return shape(tensor=tensor, pipeline=pipeline, layers=layers, data=data, **changes)

    across = run(2, 2, 4)  # two nodes of eight: the pipeline is what megatron-core lays across
    assert (across.tensor_per_node, across.replicas_per_node, across.pipeline_per_node) == (2, 4, 1)
    mapped = run(2, 2, 4, mapped=True)
    assert (mapped.replicas_per_node, mapped.pipeline_per_node) == (2, 2)
    assert run(16, 1, 1).tensor_per_node == 8
    assert run(1, 1, 16).replicas_per_node == 8
    slow = dataclasses.replace(H200, network=1e7)  # no launch hides it
    for spread in (across, mapped, run(16, 1, 1), run(1, 1, 16)):
        near = dataclasses.replace(spread, per_node=16)
        assert estimate(spread, slow).seconds > estimate(near, slow).seconds
        assert least_seconds(spread, slow) <= estimate(spread, slow).seconds
        if spread.pipeline == 1:
            assert least_seconds(spread, slow) > least_seconds(near, slow)
        assert estimate(near, slow).seconds == estimate(near, H200).seconds
    assert H200.group_link(4, 4) == H200.link
    assert H200.group_link(16, 2) == 2 * H200.network  # a ring through the adapters of both


def test_groups_that_do_not_lie_evenly_on_nodes_have_their_least_there() -> None:
    """With groups of 4 on nodes of 6, ranks 4 to 7 lie on two nodes."""
    run = shape(tensor=4, pipeline=3, layers=(3, 3, 2), data=1, per_node=6)
    assert (run.tensor_per_node, run.replicas_per_node, run.pipeline_per_node) == (2, 1, 1)
    slow = dataclasses.replace(H200, network=1e7)
    near = dataclasses.replace(run, per_node=12)
    assert estimate(run, slow).seconds > 2 * estimate(near, slow).seconds


@settings(max_examples=100)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8])] * 3),
    per_node=st.integers(1, 16),
    mapped=st.booleans(),
)
def test_a_nodes_share_of_a_group_is_the_least_that_there_is(
    sizes: tuple[int, int, int], per_node: int, mapped: bool
) -> None:
    tensor, data, pipeline = sizes
    run = shape(
        tensor=tensor, data=data, pipeline=pipeline, per_node=per_node, mapped=mapped,
        layers=(1,) * pipeline,
    )  # fmt: skip
    order = {"tensor": tensor, "pipeline": pipeline, "replicas": data}
    if not mapped:
        order = {"tensor": tensor, "replicas": data, "pipeline": pipeline}
    ranks = np.arange(run.world_size).reshape(list(order.values())[::-1])
    for axis, name in enumerate(reversed(order)):
        groups = np.moveaxis(ranks, axis, -1).reshape(-1, order[name])
        least = min(np.unique(group // per_node, return_counts=True)[1].min() for group in groups)
        assert getattr(run, f"{name}_per_node") == least


def test_collectives_of_a_layer_are_those_that_are_sent() -> None:
    plain = shape("--tensor-model-parallel-size 4", world_size=4)
    spread = dataclasses.replace(plain, sequence_parallel=True)
    whole = 2 * plain.elements
    assert collective_bytes(plain) == 2 * 3 / 4 * whole
    assert collective_bytes(spread) == 3 / 4 * whole
    assert (collectives(plain), collectives(spread)) == ((2, 2), (4, 6))
    assert collectives(shape()) == (0, 0)
    per_layer = traffic(plain).tensor / plain.num_layers / plain.num_microbatches
    assert per_layer == 4 * collective_bytes(plain)
    again = dataclasses.replace(plain, recompute="full")
    assert traffic(again).tensor == 1.5 * traffic(plain).tensor


@pytest.mark.parametrize(
    "words",
    ["--ranks 0", "--ranks -1", "--memory -3", "--tflops 0", "--tflops nan", "--per-node 0"],
)
def test_sizes_and_rates_are_above_0(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS.split(), *words.split(), "--gpu", "H200"]) == 2
    assert capsys.readouterr().err.endswith(": must be above 0\n")


def test_an_estimate_knows_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*FLAGS.split(), "--gpu", "H200", "--ranks", "16", "--tensor-model-parallel-size", "8"]
    times = []
    for more in ([], ["--per-node", "4"]):
        assert main([*words, *more]) == 0
        times.append(capsys.readouterr().out.splitlines()[-1])
    assert times[0] != times[1]


def test_a_cpu_is_measured_by_the_library_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's matrix products may be twice as fast as PyTorch's."""
    pytest.importorskip("torch")
    by_torch = cpu_device()
    assert by_torch.source == "a matrix product of PyTorch's, measured now"
    monkeypatch.delitem(sys.modules, "torch")
    by_numpy = cpu_device()
    assert by_numpy.source == "a matrix product of numpy's, measured now"
    assert min(by_torch.flops, by_numpy.flops) > 1e8


def test_sharded_layers_wait_for_their_gathers_on_a_cpu() -> None:
    slow = dataclasses.replace(cpu_device(), collective=1.0)
    plain, gradients, parameters = (
        sum(part_times(shape(data=2, shard=shard), slow).layer)
        for shard in ("none", "gradients", "parameters")
    )
    assert (gradients - plain, parameters - plain) == pytest.approx((2.0, 3.0), rel=1e-3)
