"""Counts of parameters, bytes and times of small shapes, each from its definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.dpp_train.cost.device import gpu_device
from megatron.dpp_train.cost.estimate import estimate, outside_seconds, predict, traffic
from megatron.dpp_train.cost.memory import (
    embedding_parameters,
    expert_parameters,
    head_bytes,
    layer_bytes,
    layer_parameters,
    least_bytes,
    logits,
    model_parameters,
    rank_memory,
    rank_parameters,
    shared_parameters,
    stage_bytes,
)
from megatron.dpp_train.cost.shape import ExpertShape, ModelShape, Precision, RunSchedule, RunShape
from megatron.dpp_train.cost.times import (
    hop_bytes,
    model_costs,
    part_times,
    ring_bytes,
    ring_seconds,
)

H200 = gpu_device("NVIDIA H200", 141 * 2**30)
MODEL = ModelShape(
    hidden_size=64, seq_length=32, vocab_size=640, num_heads=4, num_groups=2, head_size=16,
    ffn_hidden_size=256,
)  # fmt: skip
EXPERTS = ExpertShape(number=8, topk=2, ffn_hidden_size=48, shared=16)


def shape(layers: tuple[int, ...] = (4,), model: dict[str, Any] | None = None, **more: Any) -> Any:
    return RunShape(model=dataclasses.replace(MODEL, **model or {}), layers=layers, **more)


def plain_device(**more: Any) -> Any:
    """Matrix products and what is given alone take time."""
    free = {"bytes_per_second": 1e30, "link": 1e30, "network": 1e30}
    free |= {"collective": 0.0, "launch": 0.0, "between": 0.0, "flops": 1e12}
    return dataclasses.replace(H200, **free | more)


# Parameters ---------------------------------------------------------------------------------------


def test_a_tied_table_is_on_the_first_rank_and_on_the_last() -> None:
    table = MODEL.vocab_size * MODEL.hidden_size
    norm = 2 * MODEL.hidden_size
    cut = shape((2, 2), pipeline=2)
    each = layer_parameters(cut)
    assert rank_parameters(cut, 0) == 2 * each + table == 2 * each + embedding_parameters(cut)
    assert rank_parameters(cut, 1) == 2 * each + table + norm
    assert rank_parameters(shape(), 0) == 4 * each + table + norm == model_parameters(cut)
    untied = shape((2, 2), {"tied": False}, pipeline=2)
    assert model_parameters(untied) == model_parameters(cut) + table
    middle = shape((1, 2, 1), pipeline=3)
    assert rank_parameters(middle, 1) == 2 * each


def test_the_layers_of_a_rank_are_those_of_all_its_chunks() -> None:
    cut = shape((1, 2, 3, 4), pipeline=2)
    each = layer_parameters(cut)
    assert [rank_parameters(cut, r) - rank_parameters(shape((0, 0), pipeline=2), r)
            for r in (0, 1)] == [4 * each, 6 * each]  # fmt: skip


def test_the_state_of_experts_is_shared_by_their_own_replicas() -> None:
    run = shape(model={"experts": EXPERTS}, data=4, expert=4, shard="optimizer")
    of_experts = 4 * expert_parameters(run)
    assert of_experts == 4 * 2 * (2 * 64 * 48 + 48 + 64)
    dense = rank_parameters(run, 0) - of_experts
    assert (run.expert_replicas, run.expert_sharers, run.sharers) == (1, 1, 4)
    assert shared_parameters(run, 0) == dense / 4 + of_experts
    wide = dataclasses.replace(run, data=8, tensor=2, expert=2, expert_tensor=2)
    assert (wide.expert_replicas, wide.expert_sharers, wide.replicas) == (4, 4, 8)
    pairs = dataclasses.replace(wide, instances=4)
    assert (pairs.sharers, pairs.expert_sharers) == (2, 1)


def test_context_parallel_ranks_share_samples_and_reduce_gradients() -> None:
    run = shape(data=2, context=4, micro_batch=3, num_microbatches=5)
    assert run.global_batch == 3 * 5 * 2
    assert (run.replicas, run.world_size, run.tokens) == (8, 8, 3 * 32 // 4)


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("element", "master"), [(2, 4), (4, 0)])
def test_16_bits_have_a_copy_in_32(element: int, master: int) -> None:
    run = shape(precision=Precision(element=element))
    found = rank_memory(run, 0, 7.0)
    count = model_parameters(run)
    assert (found.weights, found.gradients) == (element * count, 4 * count)
    assert found.optimizer == (8 + master) * count
    assert found.total == found.state + 7.0 + found.workspace


def test_the_head_is_kept_on_the_last_virtual_stage_alone() -> None:
    run = shape((1, 1, 1, 1), pipeline=2)
    each = layer_bytes(run)
    assert [stage_bytes(run, stage) - each for stage in range(4)] == [0, 0, 0, head_bytes(run)]


def test_a_heads_backward_in_forward_keeps_one_microbatchs_logits() -> None:
    whole = shape((2, 2), pipeline=2, num_microbatches=8)
    cut = dataclasses.replace(whole, schedule=RunSchedule(dynamic=True, head_in_forward=True))
    hidden = 2 * 32 * 64
    assert head_bytes(whole) - head_bytes(cut) == 4 * logits(whole) - hidden
    more = rank_memory(cut, 1, 0.0).workspace - 2 * logits(whole)
    assert more == 4 * logits(whole), "they stand beside their gradient"
    costs = [model_costs(each, plain_device()).head.times for each in (whole, cut)]
    assert costs[1] == (pytest.approx(sum(costs[0])), 0.0, 0.0)


def test_a_rank_holds_the_forwards_before_its_first_gradient() -> None:
    """Rank r of p runs p - r of them, of each of its chunks, if there are as many."""
    run = shape((2, 2, 2, 2), pipeline=4, num_microbatches=8)
    fullest = rank_memory(run, 0, 4 * 2 * layer_bytes(run)).total
    assert least_bytes(run) == max(
        fullest, rank_memory(run, 3, 2 * layer_bytes(run) + head_bytes(run)).total
    )
    small = shape((2, 2, 2, 2), {"vocab_size": 8}, pipeline=4, num_microbatches=8)
    assert least_bytes(small) == rank_memory(small, 0, 4 * 2 * layer_bytes(small)).total
    few = dataclasses.replace(small, num_microbatches=3)
    assert least_bytes(few) == rank_memory(few, 0, 3 * 2 * layer_bytes(few)).total
    chunked = dataclasses.replace(small, layers=(1,) * 8)
    assert least_bytes(chunked) == rank_memory(chunked, 0, 4 * 2 * layer_bytes(chunked)).total


def test_full_sharding_gathers_the_root_and_two_layers() -> None:
    run = shape(shard="parameters", data=4, precision=Precision(gradient=2))
    count, layer = model_parameters(run), layer_parameters(run)
    plain = rank_memory(dataclasses.replace(run, shard="none"), 0, 0.0)
    own = rank_memory(run, 0, 0.0)
    root = count - 4 * layer
    assert own.workspace - plain.workspace == 2 * (root + 3 * layer)
    assert own.weights == own.gradients == 2 * count / 4
    gradients = rank_memory(dataclasses.replace(run, shard="gradients"), 0, 0.0)
    assert gradients.workspace - plain.workspace == 2 * (count + layer)


def test_a_norm_without_a_mean_keeps_one_number_of_a_token() -> None:
    """Two norms in a layer, one before the head, in 32 bits each."""
    layer, plain = shape(), shape(model={"norm_vectors": 1})
    assert layer_bytes(layer) - layer_bytes(plain) == 2 * 4 * 32
    assert head_bytes(layer) - head_bytes(plain) == 4 * 32


def test_full_recompute_keeps_one_input_for_its_layers_and_runs_them_again() -> None:
    plain = shape()
    once = dataclasses.replace(plain, recompute="full")
    twice = dataclasses.replace(once, recompute_num_layers=2)
    assert layer_bytes(once) == 2 * 32 * 64 == 2 * layer_bytes(twice)
    again = rank_memory(twice, 0, 0.0).workspace - rank_memory(once, 0, 0.0).workspace
    assert again == layer_bytes(plain)


def test_a_policy_that_holds_all_microbatches_is_simulated_with_all() -> None:
    for policy, cap, held in (("breadth-first", "32p", 64), ("megatron", "megatron", 2)):
        run = shape(
            (2, 2), pipeline=2, num_microbatches=64,
            schedule=RunSchedule(dynamic=True, policy=policy, cap=cap),
        )  # fmt: skip
        found = predict(run, model_costs(run, plain_device()))
        assert found.peak_bytes[0] == pytest.approx(held * 2 * layer_bytes(run))


# Times and traffic --------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 2, 2)])
def test_a_rate_is_that_of_each_device_of_all_its_groups(sizes: tuple[int, int, int]) -> None:
    tensor, data, context = sizes
    run = shape((2, 2), pipeline=2, tensor=tensor, data=data, context=context, num_microbatches=4)
    found = estimate(run, H200)
    assert found.tokens_per_second * found.seconds == pytest.approx(run.global_batch * 32)
    rate = found.flops_per_token * found.tokens_per_second / 8
    assert found.flops_per_device == pytest.approx(rate)


def test_replicas_reduce_the_gradients_of_the_fullest_rank() -> None:
    run = shape((1, 5), pipeline=2, data=2)
    assert rank_parameters(run, 1) > rank_parameters(run, 0)
    assert traffic(run).data == 2 * 1 / 2 * rank_parameters(run, 1) * 4
    sharded = dataclasses.replace(run, shard="optimizer")
    assert traffic(sharded).data == 1 / 2 * rank_parameters(run, 1) * (4 + 2)
    assert traffic(dataclasses.replace(run, data=1)).data == 0


def test_the_optimizer_passes_over_the_largest_share() -> None:
    run = shape((1, 5), pipeline=2)
    device = plain_device(bytes_per_second=1e6)
    touched = 2 + 8 + 8
    expected = rank_parameters(run, 1) * 4 * touched / 1e6
    assert outside_seconds(run, device) == pytest.approx(expected)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_recomputed_runs_once_more_in_a_backward(recompute: str) -> None:
    run = shape(recompute=recompute)
    forward, backward, weight = part_times(run, plain_device()).layer
    plain = part_times(shape(), plain_device()).layer
    again = {"none": 0.0, "selective": forward - weight, "full": forward}[recompute]
    assert (forward, weight) == (plain[0], plain[2])
    assert backward == pytest.approx(plain[1] + again)
    assert 0 < forward - weight < forward, "attention's core is what selective runs again"


def test_a_ring_passes_gradients_of_keys_and_values_too() -> None:
    run = shape(context=4, data=1)
    slow = plain_device(link=1e6, network=1e6)
    ring = ring_seconds(run, slow)
    assert ring == pytest.approx(ring_bytes(run) / (0.95 * 1e6))
    assert ring_bytes(run) == 3 * 2 * (32 // 4) * 32 * 2
    assert ring_seconds(run, plain_device(collective=1.0)) == pytest.approx(3.0), "three steps"
    assert ring_seconds(shape(), slow) == 0.0
    linear = part_times(run, plain_device()).layer[2]
    forward, backward, _ = part_times(run, slow).layer
    assert forward - linear == pytest.approx(ring) and backward - linear == pytest.approx(2 * ring)
    gathers = dataclasses.replace(run, gathers_keys=True)
    core = part_times(run, plain_device()).layer[0] - linear
    assert part_times(gathers, slow).layer[0] - linear == pytest.approx(core + ring)


def test_a_hop_crosses_the_network_where_a_pipeline_spans_nodes() -> None:
    device = plain_device(link=1e9, network=1e6)
    near = shape((2, 2), pipeline=2, data=2, per_node=4)
    assert model_costs(near, device).hop == hop_bytes(near) / 1e9
    for run in (
        dataclasses.replace(near, per_node=2),
        shape((1, 1, 2), pipeline=3, per_node=2),
        shape((1, 1, 1, 1), pipeline=4, per_node=2),  # two stages on each node
    ):
        assert model_costs(run, device).hop == hop_bytes(run) / 1e6
    mapped = dataclasses.replace(near, per_node=2, mapped=True)
    assert model_costs(mapped, device).hop == hop_bytes(mapped) / 1e9
    assert hop_bytes(near) == 2 * 32 * 64
    spread = dataclasses.replace(near, tensor=2, sequence_parallel=True)
    assert hop_bytes(spread) == 32 * 64
