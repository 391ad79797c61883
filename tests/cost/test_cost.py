"""The door of the cost model, and its formulas against definitions and the papers'."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.cost import Devices, choose, describe, find_devices, named_devices
from megatron.dpp_train.cost.choose import Search
from megatron.dpp_train.cost.device import Device, gpu_device
from megatron.dpp_train.cost.estimate import estimate, outside_seconds
from megatron.dpp_train.cost.flags import Given, shape_of
from megatron.dpp_train.cost.memory import (
    head_bytes,
    layer_bytes,
    layer_parameters,
    least_bytes,
    model_parameters,
    rank_memory,
    rank_parameters,
    shared_parameters,
)
from megatron.dpp_train.cost.pipeline import balanced, least_seconds, predict
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.times import collective_seconds, part_times
from megatron.dpp_train.presets.flags import from_argv

FLAGS = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16 "
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 64 "
    "--transformer-impl local --padded-vocab-size 1024 "
)
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --disable-bias-linear "
MEDIUM = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 "
    "--max-position-embeddings 1024 --global-batch-size 64 "
)
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu "
    "--group-query-attention --num-query-groups 8 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
    "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 128255 --global-batch-size 128 "
)


def of_words(words: str) -> dict[str, Any]:
    """Flags of a command line; of those that stand twice the last one wins."""
    return from_argv(words.split())


H200 = gpu_device("NVIDIA H200", 141 * 2**30)


def shape(flags: str = "", number: int = 1, **changes: Any) -> RunShape:
    """The shape of a small run with some of it changed."""
    run = shape_of(Given(of_words(FLAGS + flags)), number, number, on_gpu=True, arch="gpt")
    return dataclasses.replace(run, **changes)


def plain_device(**more: Any) -> Device:
    """Matrix products and what is given alone take time."""
    free = {"bytes_per_second": 1e30, "link": 1e30, "network": 1e30}
    free |= {"collective": 0.0, "launch": 0.0, "between": 0.0, "flops": 1e12}
    return dataclasses.replace(H200, **free | more)  # type: ignore[arg-type]


# The door


def test_describe_names_what_a_run_needs() -> None:
    flags = MEDIUM + "--pipeline-model-parallel-size 2 --use-dpp --tensor-model-parallel-size 2 "
    flags += "--transformer-impl local"
    text = describe(of_words(flags), named_devices("h100", 8))
    assert text[0] == "layout      tensor 2 x pipeline 2 x data 2 = 8 ranks, policy eager"
    assert "354,871,296 in 16 bit" in text[2]
    assert [line.split()[:2] for line in text[4:6]] == [["stage", "0"], ["stage", "1"]]
    assert text[4].count("GiB") + text[4].count("MiB") == 6
    kinds = ("replaying CUDA graphs", "simulated", "ms per iteration", "80.00 GiB")
    assert all(any(kind in line for line in text) for kind in kinds)
    words = {"--bf16": True, "num-layers": 24, "hidden_size": 1024, "--num-attention-heads": 16}
    words |= {"--seq-length": 1024, "--max-position-embeddings": 1024, "--global-batch-size": 64}
    assert describe(words, named_devices("H100", 8)) == describe(
        of_words(MEDIUM), named_devices("NVIDIA H100 80GB", 8)
    )


def test_switches_may_be_off_and_values_of_several_words() -> None:
    run = Given(of_words("--moe-layer-freq [0]*2 +[1] --bf16"))
    assert run.word("moe_layer_freq") == "[0]*2 +[1]" and run.on("bf16")
    assert not Given({"--use-dpp": False}).on("use_dpp")
    zero = Given({"--hidden-dropout": 0, "--sgd-momentum": 0.0, "--num-experts": 0})
    assert (zero.word("hidden_dropout"), zero.word("sgd_momentum")) == ("0", "0.0")
    assert zero.word("attention_dropout") == "0.1" and zero.number("num_experts", 3, 0) == 0


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", (2, 2, 2, 2)),
        ("--decoder-first-pipeline-num-layers 3", (3, 5)),
        ("--decoder-last-pipeline-num-layers 2", (6, 2)),
        ("--account-for-embedding-in-pipeline-split --num-layers 7", (3, 4)),
        ("--account-for-loss-in-pipeline-split --num-layers 7", (4, 3)),
        ("--pipeline-model-parallel-layout Et*3|(tt|)*2,tL", (3, 2, 2, 1)),
    ],
)
def test_layers_of_stages_are_those_of_megatron(flags: str, layers: tuple[int, ...]) -> None:
    assert shape(f"--pipeline-model-parallel-size 2 {flags}", 2).layers == layers


def test_a_vocabulary_is_padded_to_a_multiple_for_each_rank() -> None:
    for more, rows in (("", 50304), ("--vocab-size 1025", 1280)):
        words = of_words(f"{MEDIUM} --tensor-model-parallel-size 2 {more}")
        run = shape_of(Given(words), 2, 2, on_gpu=True, arch="gpt")
        assert run.model.vocab_size == rows


REFUSED = {
    "--num-layers 0": "--num-layers 0: expected a whole number of at least 1",
    "--seq-length many": "--seq-length many: expected a whole number",
    "--tensor-model-parallel-size 3": "pipeline 1 x context 1 = 3 does not divide 8 ranks",
    "--tensor-model-parallel-size 8 --num-attention-heads 4": "does not divide 4 attention heads",
    "--pipeline-model-parallel-size 8 --num-layers 12": "does not divide 12 layers",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 5": "divide 4 layers",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 9": "divide 4 layers",
    "--micro-batch-size 3": "--micro-batch-size 3 x 8 replicas does not divide 64 samples",
    "--expert-model-parallel-size 2": "does not divide 1 experts",
    "--multi-latent-attention": "models with it are not estimated",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL": "2 layers on 2",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(of_words(f"{FLAGS} {words}"), named_devices("H100", 8))
    assert REFUSED[words] in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="--hidden-size is needed: a whole number"):
        describe({"--num-layers": 4}, named_devices("H100", 1))
    with pytest.raises(ConfigError, match="--global-batch-size is needed"):
        choose({"--num-layers": 4}, named_devices("H100", 1))


@pytest.mark.parametrize(
    ("flags", "gpu", "number"),
    [(MEDIUM, "H100", 4), (LLAMA, "H200", 4), (f"{LLAMA}{EXPERTS}--num-layers 8", "H100", 4)],
)
def test_a_chosen_layout_is_what_its_flags_describe(flags: str, gpu: str, number: int) -> None:
    devices = named_devices(gpu, number)
    found = choose(of_words(flags), devices)
    lines = describe(of_words(flags) | found.flags, devices)
    seconds = next(line for line in lines if line.startswith("time  ")).split()[1]
    assert found.lines[1].split()[1] == seconds
    times = [float(line.split()[1]) for line in found.lines[1:]]
    assert min(times) >= 0.9 * times[0]


def test_given_flags_stay_and_the_others_are_chosen() -> None:
    devices = named_devices("H200", 4)
    fixed = "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 1 "
    found = choose(of_words(LLAMA + fixed), devices).flags
    assert "--use-dpp" in found and not set(fixed.split()) & set(found)
    layers = found.get("--pipeline-model-parallel-layout", "")
    assert str(layers).count("t") in (0, 32)
    static = choose(of_words(LLAMA + fixed) | {"--use-dpp": False}, devices).flags
    assert "--use-dpp" not in static
    micro = choose(of_words(LLAMA + fixed) | {"--micro-batch-size": 2}, devices).flags
    assert "--micro-batch-size" not in micro


def test_no_layout_that_is_left_out_is_better() -> None:
    """Every layout that fits, simulated."""
    devices = named_devices("H200", 2)
    search = Search(Given(of_words(MEDIUM)), devices, "gpt")
    best = search.best()[0]
    for way in search.ways():
        found = estimate(way.shape, devices.device)
        share = way.least_cost / way.shape.global_batch  # a bound, whatever the parts
        assert share > 0 and least_seconds(
            way.shape, devices.device
        ) <= found.prediction.seconds * (1 + 1e-9)
        if found.peak_bytes <= 0.92 * devices.device.memory_bytes:
            parts = way.least_cost / (
                least_seconds(way.shape, devices.device)
                + outside_seconds(way.shape, devices.device)
            )
            assert best.cost <= found.seconds * parts * (1 + 1e-9)


@pytest.mark.parametrize("gib", [6, 10, 16])
def test_what_is_chosen_fits(gib: int) -> None:
    """Faster layouts would fit by their lower bound alone."""
    devices = named_devices("H200", 2)
    small = dataclasses.replace(devices.device, memory_bytes=gib * 2**30)
    search = Search(Given(of_words(MEDIUM)), dataclasses.replace(devices, device=small), "gpt")
    assert all(way.found and way.found.peak_bytes <= 0.92 * gib * 2**30 for way in search.best())


def test_tensor_parallel_groups_stay_on_a_node_and_shares_of_memory_free() -> None:
    devices = named_devices("H100", 8, per_node=2)
    ways = list(Search(Given(of_words(LLAMA)), devices, "gpt").ways())
    assert {way.shape.tensor for way in ways} == {1, 2}
    assert max(least_bytes(way.shape) for way in ways) <= 0.92 * 80 * 2**30
    assert all(way.shape.num_microbatches >= way.shape.pipeline for way in ways)
    static = of_words(f"{LLAMA}--global-batch-size 96") | {"--use-dpp": False}
    shapes = [way.shape for way in Search(Given(static), devices, "gpt").ways()]
    assert all(run.chunks == 1 or run.num_microbatches % run.pipeline == 0 for run in shapes)


def test_what_fits_nowhere_names_the_nearest_number_that_does() -> None:
    flags = of_words(f"{LLAMA}--num-layers 8")
    with pytest.raises(ConfigError, match=r"no layout fits: .* needs .* nearest: --gpus \d+") as e:
        choose(flags, named_devices("RTX 4090", 1))
    number = int(str(e.value).split("--gpus ")[1].split(",")[0])
    assert choose(flags, named_devices("RTX 4090", number)).flags
    with pytest.raises(ConfigError, match="no layout fits"):
        choose(flags, named_devices("RTX 4090", number // 2))


# Devices


def test_gpus_have_many_spellings() -> None:
    for name in ("H100", "h100", "NVIDIA H100 PCIe", "nvidia-h100", "NVIDIA H100-SXM5-80GB"):
        assert named_devices(name, 16).device.memory_bytes == 80 * 2**30
    for name in ("rtx4090", "4090", "NVIDIA GeForce RTX-4090"):
        assert named_devices(name, 1).device.name == "RTX 4090"
    assert (named_devices("H100", 16).per_node, named_devices("H100", 4).per_node) == (8, 4)
    with pytest.raises(ConfigError, match="--gpu H1000: expected one of GB200, "):
        named_devices("H1000", 1)
    kinds = [gpu_device(name, 1) for name in ("NVIDIA A100", "Tesla V100", "NVIDIA H20", "X1")]
    assert [gpu.bf16 for gpu in kinds] == [True, False, True, True]
    assert (kinds[2].flops, kinds[3].flops) == (1.1e14, 3e13), "not an H200, and a guess"


def test_this_machines_gpus_are_those_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 MIG, [N/A]\nwarning: noise\n"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = find_devices(nodes=2)
    assert (found.number, found.per_node, found.on_gpu) == (4, 2, True)
    assert found.device.memory_bytes == 81559 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_devices().number == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cpu = find_devices(3)
    assert (cpu.number, cpu.on_gpu) == (3, False)


# Parameters and memory, by definition


def test_experts_are_shared_by_their_own_replicas() -> None:
    alone, shared = (
        shape(f"{EXPERTS}{more}--use-distributed-optimizer", 8)
        for more in ("", "--expert-model-parallel-size 4 ")
    )
    each = 8 * 2 * 96 * 256
    assert rank_parameters(alone, 0) - rank_parameters(shared, 0) == 8 * each * 3 // 4
    assert model_parameters(shared) == rank_parameters(alone, 0)
    dense = rank_parameters(shared, 0) - 8 * each // 4
    assert shared_parameters(shared, 0) == dense / 8 + 8 * each / 4 / 2
    # Two all-to-alls; a rank keeps a quarter of its 2 * 256 routed tokens.
    sent = 2 * 3 / 4 * 2 * 256 * 256 * 2
    times = [part_times(run, plain_device(link=1.0)).layer[0] for run in (alone, shared)]
    assert times[1] - times[0] == pytest.approx(sent)


def test_dense_layers_beside_experts_cost_what_theirs_do() -> None:
    words = f"{EXPERTS}--expert-model-parallel-size 2 --moe-layer-freq"
    none, half, every = (shape(f"{words} {each}", 2) for each in ("[0]*8", "2", "1"))
    assert model_parameters(none) + model_parameters(every) == 2 * model_parameters(half)
    times = [part_times(each, plain_device()).layer for each in (none, half, every)]
    mean = [(first + last) / 2 for first, last in zip(times[0], times[2], strict=True)]
    assert times[1] == pytest.approx(mean) and times[1] != pytest.approx(times[0])


@pytest.mark.parametrize(
    ("flags", "state"),
    [
        ("", 18.0),
        ("--use-distributed-optimizer", 6 + 12 / 4),
        ("--use-torch-fsdp2", (2 + 2 + 12) / 4),
        ("--optimizer sgd", 2 + 4 + 4 + 4),
        ("--optimizer sgd --sgd-momentum 0", 2 + 4 + 4),
    ],
)
def test_state_bytes_of_a_parameter(flags: str, state: float) -> None:
    run = shape(flags, 4)
    memory = rank_memory(run, 0, 7.0)
    held = memory.weights + memory.gradients + memory.optimizer
    assert held == pytest.approx(state * model_parameters(run))
    assert memory.total == held + 7.0 + memory.workspace


def test_weights_of_layers_in_8_bit_stand_beside_those_in_16() -> None:
    plain, eight = (rank_memory(shape(f), 0, 0.0).weights for f in ("", "--fp8-format hybrid"))
    assert eight - plain == 2 * 8 * layer_parameters(shape())


def test_activations_of_a_layer_are_what_the_paper_counts() -> None:
    """Korthikanti et al., 2022, equations 1, 2, 4: with dropout, in 16 bits, flash attention, whose
    log-sum-exp counts here. The paper leaves the norms' statistics out: 16 bytes a token."""
    unit, tokens = 2 * 128 * 256, 2 * 128
    more = 16 * tokens + 4 * tokens * 8
    assert layer_bytes(shape()) == unit * 34 + more
    tensor = shape("--tensor-model-parallel-size 4", 4)
    assert layer_bytes(tensor) == unit * (10 + 24 / 4) + 16 * tokens + 4 * tokens * 8 / 4
    spread = shape("--tensor-model-parallel-size 4 --sequence-parallel", 4)
    assert layer_bytes(spread) == layer_bytes(shape()) / 4
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    assert layer_bytes(shape(full)) == 2 * unit / 2


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_even_static_stages_have_the_bubble_and_memory_of_the_formulas(
    chunks: int, microbatches: int
) -> None:
    run = shape(pipeline=4, layers=(2,) * 4 * chunks, num_microbatches=microbatches, data=1)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=0))
    found = predict(run, plain_device())
    formula = 3 / (chunks * microbatches)
    assert found.bubble == pytest.approx(formula / (1 + formula), abs=1e-6)
    if microbatches == 16:  # section 4.2.3 of the same paper
        factor = 1.0 if chunks == 1 else 1 + 3 / (4 * chunks)
        assert found.peak_bytes[0] == pytest.approx(8 * chunks * layer_bytes(run) * factor)


def test_a_heads_backward_in_forward_keeps_one_microbatchs_logits() -> None:
    whole = shape(layers=(4, 4), pipeline=2, num_microbatches=8)
    cut = dataclasses.replace(whole, dynamic=True, head_in_forward=True)
    assert head_bytes(whole) - head_bytes(cut) == 4 * whole.logits - 2 * whole.elements
    heads = [part_times(each, plain_device()).head for each in (whole, cut)]
    assert heads[1] == (pytest.approx(sum(heads[0])), 0.0, 0.0)


def test_a_policy_that_holds_all_microbatches_is_simulated_with_all() -> None:
    for policy, cap, held in (("breadth-first", "32p", 64), ("megatron", "megatron", 2)):
        run = shape(layers=(4, 4), pipeline=2, num_microbatches=64, dynamic=True)
        run = dataclasses.replace(run, policy=policy, cap=cap)
        assert predict(run, plain_device()).peak_bytes[0] == pytest.approx(
            held * 4 * layer_bytes(run)
        )


# Times and traffic


def test_collectives_are_those_that_are_sent() -> None:
    slow = plain_device(link=1.0)
    plain = shape("--tensor-model-parallel-size 4", 4)
    spread = dataclasses.replace(plain, sequence_parallel=True)
    each = 2 * 3 / 4 * 2 * plain.elements
    assert collective_seconds(plain, slow) == pytest.approx(each)
    assert collective_seconds(spread, slow) == pytest.approx(each / 2)
    passes = [part_times(run, slow).layer[:2] for run in (plain, spread)]
    assert [[round(each_ / each, 3) for each_ in pair] for pair in passes] == [[2, 2], [2, 3]]
    ring = 3 * 2 * 64 * 256 * 2  # keys and values of a quarter, three times
    assert part_times(dataclasses.replace(shape(), context=4), slow).layer[:2] == (
        pytest.approx(ring), pytest.approx(2 * ring),
    )  # fmt: skip
    uneven = shape(layers=(2, 6), pipeline=2, data=2)
    sharded = dataclasses.replace(uneven, shard="optimizer")
    device = plain_device(link=1.0)
    for run, number in ((uneven, 2 * 4), (sharded, 4 + 2)):
        wanted = rank_parameters(run, 1) / 2 * number
        assert outside_seconds(run, device) == pytest.approx(wanted)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_recomputed_runs_once_more_in_a_backward(recompute: str) -> None:
    forward, backward, weight = part_times(shape(recompute=recompute), plain_device()).layer
    plain = part_times(shape(), plain_device()).layer
    again = {"none": 0.0, "selective": forward - weight, "full": forward}[recompute]
    assert (forward, weight) == (plain[0], plain[2])
    assert backward == pytest.approx(plain[1] + again)


def test_what_spans_nodes_travels_over_the_network() -> None:
    device = plain_device(link=1e9, network=1e6)
    near = shape(layers=(4, 4), pipeline=2, data=2, per_node=4)
    hop = 2 * near.elements
    assert part_times(near, device).hop == hop / 1e9
    far = dataclasses.replace(near, per_node=2)
    assert part_times(far, device).hop == hop / 1e6
    assert H200.group_link(16, 2) == 2 * H200.network  # a ring through the adapters of both
    slow = dataclasses.replace(H200, network=1e7)
    for run in (shape(tensor=16), shape(data=16)):
        assert estimate(dataclasses.replace(run, per_node=16), slow).seconds < (
            estimate(dataclasses.replace(run, per_node=8), slow).seconds
        )


@pytest.mark.parametrize(
    ("size", "stride", "per_node", "there"),
    [(8, 1, 4, 4), (4, 2, 8, 4), (4, 4, 8, 2), (2, 8, 8, 1)],
)
def test_a_nodes_share_of_a_group(size: int, stride: int, per_node: int, there: int) -> None:
    assert shape(per_node=per_node).on_a_node(size, stride) == there


# Layers


@settings(max_examples=15)
@given(
    layers=st.integers(6, 24),  # the stages in the middle have one each at least
    pipeline=st.sampled_from([2, 4]),
    chunks=st.sampled_from([1, 2]),
    words=st.sampled_from([1024, 20_000]),
)
def test_balanced_layers_are_all_there_and_no_slower(
    layers: int, pipeline: int, chunks: int, words: int
) -> None:
    stages = pipeline * chunks
    even = tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    run = shape(f"--padded-vocab-size {words}", dynamic=True, policy="auto", cap="auto", split=True)
    run = dataclasses.replace(run, layers=even, pipeline=pipeline, num_microbatches=8)
    found = balanced(run, H200)
    assert sum(found.layers) == layers and min(found.layers[1:-1], default=1) >= 1
    assert least_seconds(found, H200) <= min(least_seconds(run, H200), predict(found, H200).seconds)


@settings(max_examples=25)
@given(
    micro=st.integers(1, 4),
    pipeline=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
    dynamic=st.booleans(),
)
def test_more_work_never_costs_less(micro: int, pipeline: int, chunks: int, dynamic: bool) -> None:
    stages = pipeline * chunks if pipeline > 1 else 1
    run = shape(
        pipeline=pipeline, layers=(8 // stages,) * stages, micro_batch=micro,
        num_microbatches=2 * pipeline,
    )  # fmt: skip
    if dynamic:
        run = dataclasses.replace(run, dynamic=True, policy="dynamic", cap="auto", split=True)
    small, large = (estimate(dataclasses.replace(run, micro_batch=micro + n), H200) for n in (0, 1))
    assert large.peak_bytes > small.peak_bytes and large.seconds >= small.seconds
    assert 0 <= small.prediction.bubble < 1
    assert least_bytes(run) <= small.peak_bytes


def test_lower_bounds_count_the_microbatches_and_hops_that_there_are() -> None:
    run = shape("--pipeline-model-parallel-size 4", 4)
    assert least_bytes(dataclasses.replace(run, num_microbatches=1)) < least_bytes(run)
    link = run.element_bytes * run.outside  # three hops of a second each
    assert least_seconds(run, plain_device(link=link)) >= 3.0


def test_a_cpu_hides_no_head_and_replays_nothing() -> None:
    run = shape("--use-dpp --dpp-cuda-graphs off", layers=(4, 4), pipeline=2)
    slow = dataclasses.replace(H200, queues=False, launch=1.0)
    assert part_times(run, slow).head == part_times(run, dataclasses.replace(slow, launch=0)).head
    cpu = Devices(device=slow, number=2, per_node=2)
    flags = FLAGS + "--use-dpp --pipeline-model-parallel-size 2"
    assert "replaying" not in describe(of_words(flags), cpu)[-1]
