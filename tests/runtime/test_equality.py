"""Every schedule over every transport gives the static schedule's numbers to the last bit.

Each test starts its ranks once and runs several layouts in them (equality_worker.py). The delays
injected into tasks and messages make every dynamic run take another order.
"""

from __future__ import annotations

import pytest

from tests.runtime.cases import (
    EXPERTS,
    FUSED_GRAPHS,
    LATE,
    LATE_GRAPHS,
    OPTIMIZED,
    UNLIKE,
    case,
    check,
)

fused, late = {"split_backward": "off", "inject": LATE}, {"inject": LATE}


def test_two_ranks_any_number_of_chunks() -> None:
    check(
        2,
        case("v1", 2, 5, fused, late, {"static": True, "transport": "shm"}, dropout=0.1),
        case("v2", 2, 4, fused, late, {"static": True, "transport": "shm", "inject": LATE}, v=2,
             dropout=0.1),
        case("one stage", 1, 3, fused, {"inject": "delay:4ms"}, dropout=0.1, layers=3),
        case("selective", 2, 4, late, v=2, recompute="selective", spec="megatron", dropout=0.1),
        case("fused wgrad", 2, 4, fused, late, v=2, fusion=True, overlap=True),
        case("kinds", 2, 4, {"transport": "shm", "checksum": True}, v=2),
        *(case(f"tp2 {sp}", 1, 3, {"split_backward": "on"}, tp=2, sp=sp, layers=2)
          for sp in (False, True)),
        case("part of the microbatches v2, per token", 2, 4, late, v=2, layers=4, partial=2,
             per_token=True),
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_in_further_layouts() -> None:
    check(
        2,
        case("v4", 2, 6, fused, late, {"activation_cap": "strict"}, v=4, spec="megatron"),
        case("one", 2, 1, late, {"split_backward": "auto"}, recompute="full"),
        case("some layers", 2, 3, late, {"static": True, "transport": "shm"}, recompute="some"),
        case("part of the microbatches", 2, 5, fused, late, layers=2, partial=1),
    )


@pytest.mark.nixl
@pytest.mark.slow
def test_links_over_nixl() -> None:
    over = {"transport": "nixl"}
    late, static = over | {"inject": LATE}, over | {"static": True}
    check(
        2,
        case("nixl v1", 2, 5, over, late, static, dropout=0.1),
        case("nixl v2", 2, 4, late | {"checksum": True}, static, v=2, dropout=0.1),
    )
    check(4, case("nixl tp2", 2, 4, late, v=2, tp=2, sp=True, layers=4))


def test_microbatches_of_unlike_length() -> None:
    """megatron-core's own exchange tells the shapes first; our channels carry them."""
    static, tight = {"static": True, "transport": "shm"}, {"activation_cap": "strict"} | late
    follows = {"activation_cap": "static"} | late
    drawn = {"lengths": True, "layers": 4}
    told = drawn | {"model": UNLIKE}
    graphs = {"cuda_graphs": "on", "length_buckets": "off"}  # padded rows have bits of their own
    few = {"length_buckets": "2,4,5,7,9,11,13"}
    hosts = [follows | {"host": how} for how in ("silent", "announces")]
    check(
        2,
        case("host", 2, 6, late | {"host": "silent"}, *hosts, v=2, **told, iterations=3),
        case("v1", 2, 5, late, static, **told | {"layers": 2}, dropout=0.1),
        case("v2", 2, 6, fused, late, tight, static, v=2, **told),
        case("v2 drawn", 2, 4, late, v=2, expected_over="shm", **drawn),
        case("graphs", 2, 4, late | graphs, static | graphs | few, v=2,
             **told | {"iterations": 5}),
    )  # fmt: skip


@pytest.mark.slow
def test_unlike_lengths_on_four_ranks() -> None:
    """Four stages, two replicas with the distributed optimizer, and experts."""
    late, tight = {"inject": LATE}, {"activation_cap": "strict", "inject": LATE}
    unlike = {"lengths": True, "model": UNLIKE}
    packed = {"packed": "together", "per_token": True, "model": UNLIKE, "positions": "rope"}
    two = {"v": 2, "layers": 4}
    check(
        4,
        case("p4v2", 4, 8, late, tight, v=2, layers=8, **unlike),
        case("p4v2 packed", 4, 8, late, v=2, layers=8, **packed),
        case("dp2", 2, 4, late, **two, **OPTIMIZED, **unlike),
        case("dp2 packed", 2, 4, late, **two, **OPTIMIZED, **packed),
        case(
            "experts", 2, 4, late, ep=2, **two, **OPTIMIZED, **unlike | {"model": EXPERTS | UNLIKE}
        ),
    )


def test_packed_documents() -> None:
    """Each document has the numbers that it has alone, to fp32's rounding."""
    static = {"static": True, "transport": "shm"}
    told = {"packed": "together", "per_token": True, "layers": 4}
    rope, groups = {"positions": "rope"}, {"model": UNLIKE | {"num_query_groups": 2}}
    check(
        2,
        case("v1", 2, 3, fused, late, static, **told | {"layers": 2}, **groups),
        case("v2 full", 2, 4, late, v=2, **told, **rope, model=UNLIKE, recompute="full"),
        case("selective", 2, 3, late, **told | {"layers": 2}, **rope, model=UNLIKE,
             recompute="selective", dropout=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("half", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_seeds_of_delays_on_four_ranks(half: int) -> None:
    """Each run has other delays and waits; the first part is of all kinds at once."""
    runs = [{"inject": f"delay:4ms,message-delay:{2 + seed}ms"} for seed in range(half)]
    runs += [{"inject": f"jitter:0.{3 + s},transient:2x:20%"} for s in range(half)]
    if half == 1:
        runs = [{"inject": ",".join(run["inject"] for run in runs)}]
    check(
        4, case("p4v2", 4, 8, *runs, v=2, layers=8), case("p4v1", 4, 8, {"inject": LATE}, layers=4)
    )


def test_experts_and_further_tokens() -> None:
    """The number of tokens of an expert differs from microbatch to microbatch, and may be 0."""
    shared = {"moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 32}
    crowded = {"num_moe_experts": 16, "moe_token_dispatcher_type": "allgather"}
    check(
        2,
        case("experts", 2, 5, fused, late, dropout=0.1, layers=2, model=EXPERTS),
        case("experts v2", 2, 4, late, v=2, layers=4, spec="megatron", model=EXPERTS | shared),
        case("many experts", 2, 3, late, layers=2, model=EXPERTS | crowded),
        case("further tokens", 2, 4, fused, late, v=2, layers=4, model={"mtp_num_layers": 2}),
        case("further tokens, graphs", 2, 4, late | {"cuda_graphs": "on"}, layers=2, iterations=4,
             model={"mtp_num_layers": 1}),
    )  # fmt: skip


def test_captured_tasks() -> None:
    """Runs each captured function again instead of a graph, over the graph's buffers."""
    fused, late = FUSED_GRAPHS, LATE_GRAPHS
    check(
        2,
        case("graphs v2", 2, 4, fused, late, v=2, iterations=4, dropout=0.1),
        case("graphs, recompute", 2, 4, fused, late, v=2, iterations=4, recompute="full"),
        case("graphs, selective", 2, 3, late, layers=2, iterations=4, recompute="selective"),
    )


@pytest.mark.slow
def test_captured_tasks_of_further_layouts() -> None:
    fused, late = FUSED_GRAPHS, LATE_GRAPHS
    check(
        2,
        case("graphs v1", 2, 5, fused, late, iterations=4),
        case("graphs, fused wgrad", 2, 4, fused, late, v=2, iterations=4, fusion=True),
    )


def test_captured_tasks_of_static_schedules() -> None:
    """A replayed backward starts the reduction of gradients as an eager one does."""
    static = {"static": True, "cuda_graphs": "on"}
    check(
        2,
        case("graphs tp2", 1, 3, static, tp=2, sp=True, layers=2, iterations=4),
        case("graphs dp2", 1, 3, static, layers=2, iterations=4, dropout=0.1),
        case("graphs dp2 overlap", 1, 3, static, layers=2, iterations=4, overlap=True,
             bucket_size=6000),
        case("graphs dp2 overlap, one microbatch", 1, 1, static, layers=2, iterations=4,
             overlap=True, distributed_optimizer=True, bucket_size=6000, recompute="full"),
        case("graphs v2", 2, 4, static, v=2, iterations=4),
    )  # fmt: skip


@pytest.mark.slow
def test_captured_tasks_of_tensor_parallel_stages() -> None:
    late = LATE_GRAPHS
    check(4, case("graphs tp2", 2, 4, late, v=2, tp=2, sp=True, layers=4, iterations=4))


@pytest.mark.gpu
def test_graphs_draw_again_what_they_recompute() -> None:
    static = {"static": True, "cuda_graphs": "on"}
    check(
        1,
        *(
            case(f"recompute {how}", 1, 3, static, layers=3, iterations=4, dropout=0.1,
                 recompute=how, spec=spec)
            for how, spec in (("selective", "torch"), ("selective", "megatron"), ("full", "torch"))
        ),
    )  # fmt: skip


@pytest.mark.gpu
def test_graphs_of_several_lengths_on_one_gpu() -> None:
    graphs = {"static": True, "cuda_graphs": "on", "length_buckets": "2,4,5,7,9,11,13"}
    unlike = {"layers": 3, "iterations": 5, "lengths": True}
    check(
        1,
        case("plain", 1, 6, graphs, **unlike),
        case("dropout", 1, 6, graphs, **unlike, dropout=0.1, recompute="selective"),
    )


@pytest.mark.multigpu
def test_graphs_on_two_gpus() -> None:
    fused, late = FUSED_GRAPHS, LATE_GRAPHS
    static = {"static": True, "cuda_graphs": "on"}
    check(
        2,
        case("pp2", 2, 4, fused, late, static, v=2, iterations=4, dropout=0.1, fusion=True,
             overlap=True),
        case("pp2 tightest cap", 2, 6, {"activation_cap": "strict", "inject": LATE},
             {"activation_cap": "strict", "cuda_graphs": "on"}, v=2, iterations=20, dropout=0.1),
        case("pp2 selective", 2, 4, fused, late, v=2, iterations=4, dropout=0.1,
             recompute="selective"),
        case("pp2 full", 2, 4, late, static, v=2, iterations=4, dropout=0.1, recompute="full"),
        case("tp2 selective", 1, 3, static, tp=2, sp=True, layers=2, iterations=4, dropout=0.1,
             recompute="selective"),
        case("tp2 full", 1, 3, static, tp=2, layers=2, iterations=4, dropout=0.1,
             recompute="full", fusion=True),
        case("dp2 overlap", 1, 3, static, layers=3, iterations=6, overlap=True,
             distributed_optimizer=True, bucket_size=6000),
        case("dp2 overlap, all-reduce", 1, 3, static, layers=3, iterations=6, overlap=True,
             bucket_size=6000, dropout=0.1, fusion=True),
    )  # fmt: skip


def test_tensor_and_data_parallel() -> None:
    check(
        4,
        case("tp2 sequence parallel", 2, 4, late, v=2, tp=2, sp=True, dropout=0.1, layers=4),
        case("dp2 optimized", 2, 4, fused, late, v=2, dropout=0.1, layers=4, **OPTIMIZED),
        case("dp2", 2, 4, late, layers=4, between=True, per_token=True),
        case("experts, tp2", 2, 4, late, v=2, tp=2, sp=True, layers=4, model=EXPERTS),
    )


@pytest.mark.slow
def test_tensor_parallel_ranks_in_further_layouts() -> None:
    check(
        4,
        case("tp2", 2, 4, fused, late, v=2, tp=2, layers=4),
        case("tp2, unlike lengths", 2, 4, fused, late, v=2, tp=2, sp=True, layers=4, lengths=True,
             model=UNLIKE),
        case("packed, tp2", 2, 4, fused, late, v=2, tp=2, sp=True, layers=4, packed="together",
             per_token=True, positions="rope", model=UNLIKE),
    )  # fmt: skip


def test_frozen_parameters() -> None:
    """Layers behind frozen ones are trained, although their input needs no gradient."""
    graphs = [{**run, "cuda_graphs": "on"} for run in ({"static": True}, fused, late)]
    table, all_but_products = ["embedding"], ["embedding", "layernorm", "bias"]
    two = {"layers": 2, "untied": True, "iterations": 4}
    check(
        2,
        case("embedding", 2, 3, late, *graphs, frozen=table, **two),
        case("all but products", 2, 3, fused, late, *graphs, frozen=all_but_products, **two),
        case("all layers", 2, 3, fused, late, frozen=["embedding", "layers.0"], **two),
    )


def test_reduction_that_overlaps() -> None:
    """A user's own loop without no_sync_func, with force_all_reduce, and with several optimizer
    instances, between which each gradient is reduced once.
    """
    both = {"overlap": True, "distributed_optimizer": True, "layers": 2, "iterations": 3}
    check(
        4,
        case("no no_sync_func", 2, 3, late, **both, no_sync=False),
        case("everywhere", 2, 3, late, **both, everywhere=True),
        case("at the end", 2, 3, late, layers=2, distributed_optimizer=True, everywhere=True),
        case("two instances", 1, 2, late, **both, instances=2),
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["depth-first", "breadth-first", "megatron"])
def test_every_policy(policy: str) -> None:
    run = {"policy": policy, "activation_cap": "4p", "inject": LATE}
    check(2, case("v1", 2, 6, run), case("v2", 2, 6, run, v=2))
