"""Every schedule over every transport gives the static schedule's numbers to the last bit.

Each test starts its ranks once and runs several layouts in them (equality_worker.py). The delays
injected into tasks and messages make every dynamic run take another order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.trace.align import align
from megatron.dpp.trace.analysis.summary import analyse, summary
from megatron.dpp.trace.reader import open_run
from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("equality_worker.py")
SEQUENCE_TOKENS = 32
"""Tokens of a microbatch of the worker's."""
LATE = "delay:4ms,message-delay:6ms"


def check(num_ranks: int, *cases: dict[str, Any], timeout: float = 240) -> None:
    output = run_ranks(WORKER, num_ranks, [json.dumps(cases)], timeout=timeout)
    for case in cases:
        assert f"CASE {case['name']} ok" in output
    print("\n".join(line for line in output.splitlines() if line.startswith("CASE")))


def case(name: str, p: int, m: int, *runs: dict[str, Any], **layout: Any) -> dict[str, Any]:
    return {"name": name, "p": p, "m": m, "runs": runs, **layout}


EXPERTS = {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip


def test_two_ranks_any_number_of_chunks() -> None:
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    check(
        2,
        case("v1", 2, 5, fused, late, {"static": True, "transport": "shm"}, dropout=0.1),
        case("v2", 2, 4, fused, late, {"static": True, "transport": "shm", "inject": LATE}, v=2,
             dropout=0.1),
        case("one stage", 1, 3, fused, {"inject": "delay:4ms"}, dropout=0.1),
        case("selective", 2, 4, late, v=2, recompute="selective", spec="megatron", dropout=0.1),
        case("fused wgrad", 2, 4, fused, late, v=2, fusion=True, overlap=True),
        case("kinds", 2, 4, {"transport": "dist"}, {"transport": "shm", "checksum": True}, v=2),
        case("part of the microbatches v2", 2, 4, late, v=2, layers=4, partial=2),
        case("per token", 2, 4, fused, late, v=2, layers=4, per_token=True),
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_in_further_layouts() -> None:
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    check(
        2,
        case("v4", 2, 6, fused, late, {"activation_cap": "strict"}, v=4, spec="megatron"),
        case("one", 2, 1, late, recompute="full"),
        case("some layers", 2, 3, late, {"static": True, "transport": "shm"}, recompute="some"),
        case("part of the microbatches", 2, 5, fused, late, layers=2, partial=1),
    )


UNLIKE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}


def test_microbatches_of_unlike_length() -> None:
    """megatron-core's own exchange tells the shapes first; our channels carry them."""
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    static, tight = {"static": True, "transport": "shm"}, {"activation_cap": "strict"} | late
    follows = {"activation_cap": "static"} | late
    drawn = {"lengths": True, "layers": 4, "iterations": 3}
    told = drawn | {"model": UNLIKE}
    graphs, few = {"cuda_graphs": "on"}, {"length_buckets": "2,4,5,7,9,11,13"}
    hosts = [follows | {"host": how} for how in ("silent", "announces")]
    check(
        2,
        case("host", 2, 6, late | {"host": "silent"}, *hosts, v=2, **told),
        case("v1", 2, 5, fused, late, tight, static, **told, dropout=0.1),
        case("v2", 2, 6, fused, late, tight, follows, static, v=2, **told),
        case("v2 dist", 2, 4, late, {"transport": "dist"}, v=2, expected_over="shm", **drawn),
        case("graphs", 2, 4, late | graphs, late | graphs | few, static | graphs | few, v=2,
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
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    static = {"static": True, "transport": "shm"}
    told = {"packed": "together", "per_token": True, "layers": 4}
    rope, groups = {"positions": "rope"}, {"model": UNLIKE | {"num_query_groups": 2}}
    check(
        2,
        case("v1", 2, 3, fused, late, static, **told, **groups),
        case("v2 full", 2, 4, late, v=2, **told, **rope, model=UNLIKE, recompute="full"),
        case("core", 2, 4, late, v=2, **told, **rope, spec="megatron", **groups),
        case("selective", 2, 3, late, **told, **rope, model=UNLIKE, recompute="selective",
             dropout=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("half", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_seeds_of_delays_on_four_ranks(half: int) -> None:
    runs = [{"inject": f"delay:4ms,message-delay:{2 + seed}ms"} for seed in range(half)]
    runs += [{"inject": f"jitter:0.{3 + s},transient:2x:20%"} for s in range(half)]
    check(
        4, case("p4v2", 4, 8, *runs, v=2, layers=8), case("p4v1", 4, 8, {"inject": LATE}, layers=4)
    )


def test_experts_and_further_tokens() -> None:
    """The number of tokens of an expert differs from microbatch to microbatch, and may be 0."""
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    shared = {"moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 32}
    crowded = {"num_moe_experts": 16, "moe_token_dispatcher_type": "allgather"}
    check(
        2,
        case("experts", 2, 5, fused, late, dropout=0.1, layers=4, model=EXPERTS),
        case("experts v2", 2, 4, late, v=2, layers=4, spec="megatron", model=EXPERTS | shared),
        case("many experts", 2, 3, late, layers=2, model=EXPERTS | crowded),
        case("further tokens", 2, 4, fused, late, v=2, layers=4, model={"mtp_num_layers": 2}),
        case("further tokens, graphs", 2, 4, late | {"cuda_graphs": "on"}, layers=4, iterations=4,
             model={"mtp_num_layers": 1}),
    )  # fmt: skip


def test_captured_tasks() -> None:
    """Runs each captured function again instead of a graph, over the graph's buffers."""
    fused, late = (
        {"split_backward": False, "cuda_graphs": "on"},
        {"inject": LATE, "cuda_graphs": "on"},
    )
    check(
        2,
        case("graphs v2", 2, 4, fused, late, v=2, iterations=4, dropout=0.1),
        case("graphs, recompute", 2, 4, fused, late, v=2, iterations=4, recompute="full"),
        case("graphs, selective", 2, 3, late, iterations=4, recompute="selective"),
    )


@pytest.mark.slow
def test_captured_tasks_of_further_layouts() -> None:
    fused, late = (
        {"split_backward": False, "cuda_graphs": "on"},
        {"inject": LATE, "cuda_graphs": "on"},
    )
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


def test_captured_tasks_of_tensor_parallel_stages() -> None:
    late = {"inject": LATE, "cuda_graphs": "on"}
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
    fused, late = (
        {"split_backward": False, "cuda_graphs": "on"},
        {"inject": LATE, "cuda_graphs": "on"},
    )
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
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    check(
        4,
        case("tp2 sequence parallel", 2, 4, fused, late, v=2, tp=2, sp=True, dropout=0.1, layers=4),
        case(
            "dp2 distributed optimizer, overlap",
            2,
            4,
            fused,
            late,
            v=2,
            dropout=0.1,
            layers=4,
            distributed_optimizer=True,
            overlap=True,
        ),
        case("dp2", 2, 4, late, layers=4, between=True, per_token=True),
        case("experts, tp2", 2, 4, late, v=2, tp=2, sp=True, layers=4, model=EXPERTS),
    )


@pytest.mark.slow
def test_tensor_parallel_ranks_in_further_layouts() -> None:
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
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
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
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
    late = {"inject": LATE}
    both = {"overlap": True, "distributed_optimizer": True, "layers": 2, "iterations": 3}
    check(
        4,
        case("no no_sync_func", 2, 3, late, **both, no_sync=False),
        case("everywhere", 2, 3, late, **both, everywhere=True),
        case(
            "everywhere, at the end",
            2,
            3,
            late,
            layers=2,
            distributed_optimizer=True,
            everywhere=True,
        ),
        case("two instances", 1, 2, late, **both, instances=2),
    )


ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
TENSOR = {"tp": 2, "sp": True}
OPTIMIZED = {"distributed_optimizer": True, "overlap": True}
GLOBAL = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.01]}
SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}


def test_expert_parallel() -> None:
    """Replicas whose experts are apart meet in every forward and backward."""
    check(
        4,
        case("ep2 v2", 2, 4, {"inject": LATE}, v=2, ep=2, layers=4, model=EXPERTS | SHARED,
             dropout=0.1, deviates=1, **OPTIMIZED),
        case("ep2, allgather", 2, 4, {"inject": LATE}, ep=2, layers=2, model=EXPERTS | ALLGATHER),
    )  # fmt: skip


def test_a_trace_tells_the_imbalance_of_experts(tmp_path: Path) -> None:
    """Every token goes to the first of four experts, so one of two ranks has all of them."""
    skewed = EXPERTS | {
        "moe_router_topk": 1, "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.0,
    }  # fmt: skip
    runs = {"inject": LATE, "trace": str(tmp_path)}, {"static": True, "trace": str(tmp_path)}
    layout = {"ep": 2, "layers": 2, "model": skewed, "skewed": True, "recompute": "full"}
    check(4, case("skewed", 2, 3, *runs, **layout))
    for schedule in ("dpp", "pp"):
        files = open_run(tmp_path / f"data-2-pipeline-2-tensor-1-{schedule}")
        analysis = analyse(files, align(files))
        assert [len(loads.meetings) for loads in analysis.loads] == [2 * 3, 2 * 3]
        rows = summary(analysis)["experts"]
        assert [(row["layer"], row["ranks"]) for row in rows] == [(1, [0, 1]), (2, [2, 3])]
        assert {(row["imbalance"], row["worst"]) for row in rows} == {(4.0, 4.0)}
        assert {row["rank_imbalance"] for row in rows} == {2.0}
        assert all(row["group_size"] == 2 for row in rows)
        counted = [m.tokens for loads in analysis.loads for m in loads.meetings]
        assert counted == [[2 * SEQUENCE_TOKENS, 0]] * 12


def test_context_parallel() -> None:
    """Also the losses and gradients of the same sequences on one rank each."""
    told = {"cp": 2, "per_token": True, "uncut": True, "positions": "rope"}
    check(
        4,
        case("cp2", 2, 4, {"inject": LATE}, v=2, layers=4, **told, deviates=1),
        case("cp2, packed", 2, 3, {"inject": LATE}, layers=2, **told, packed="together",
             model=UNLIKE | {"num_query_groups": 2}),
        case("cp2, dropout", 2, 3, {"inject": LATE}, cp=2, layers=2, dropout=0.1,
             recompute="full"),
    )  # fmt: skip


CUT = {"per_token": True, "uncut": True, "positions": "rope"}
PLAIN_EXPERTS = EXPERTS | {"moe_aux_loss_coeff": 0.0}


@pytest.mark.slow
def test_context_parallel_in_further_layouts() -> None:
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    two = {"cp": 2, **CUT}
    packed = two | {"packed": "together", "model": UNLIKE}
    check(
        4,
        case("full", 2, 4, fused, late, v=2, layers=4, **two, recompute="full"),
        case("selective", 2, 3, late, layers=2, **two, recompute="selective", spec="megatron"),
        case("some layers", 2, 3, late, layers=4, **two, recompute="some"),
        case("optimizer", 2, 4, fused, late, v=2, layers=4, cp=2, **OPTIMIZED),
        case("groups", 2, 4, fused, late, layers=2, **two, model={"num_query_groups": 2}),
        case("packed v2", 2, 4, fused, late, v=2, layers=4, **packed),
        case("packed full", 2, 3, late, layers=2, **packed, recompute="full"),
        case("packed, optimizer", 2, 3, late, layers=2, **packed | {"uncut": False}, **OPTIMIZED),
        case("experts", 2, 4, fused, late, layers=2, **two, model=PLAIN_EXPERTS),
        case("ep2", 2, 4, fused, late, layers=2, ep=2, **two, model=PLAIN_EXPERTS),
        case("ep2 v2, dropout", 2, 4, late, v=2, layers=4, cp=2, ep=2, model=EXPERTS, dropout=0.1,
             recompute="full", **OPTIMIZED),
        case("ep2, allgather", 2, 4, late, layers=2, cp=2, ep=2, model=EXPERTS | ALLGATHER),
        case("unlike lengths", 2, 4, fused, late, v=2, layers=4, cp=2, lengths=True, model=UNLIKE,
             iterations=3),
        case("further tokens", 2, 3, late, layers=2, cp=2, model={"mtp_num_layers": 1}),
        case("one stage, tp2", 1, 3, fused, late, layers=2, tp=2, sp=True, **two),
        case("one stage, cp4", 1, 3, fused, late, layers=2, cp=4, **CUT),
    )  # fmt: skip


@pytest.mark.slow
def test_context_parallel_on_eight_ranks() -> None:
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    packed = CUT | {"packed": "together", "model": UNLIKE}
    two = {"cp": 2, **TENSOR}
    check(
        8,
        case("tp2", 2, 4, fused, late, v=2, layers=4, **two, **CUT, deviates=1),
        case("tp2, packed", 2, 3, late, layers=2, **two, **packed),
        case("tp2, dropout", 2, 4, late, layers=2, **two, dropout=0.1, recompute="selective"),
        case("tp2 ep2", 2, 4, late, v=2, layers=4, **two, ep=2, etp=1, model=EXPERTS),
        case("cp4", 2, 4, fused, late, v=2, layers=4, cp=4, **CUT, deviates=1),
        case("cp4, packed", 2, 3, late, layers=2, cp=4, **packed),
        case("cp4, dropout", 2, 4, late, layers=2, cp=4, dropout=0.1, recompute="full"),
        case("cp2 ep4", 2, 4, late, layers=2, cp=2, ep=4, model=EXPERTS),
        case("cp2 dp2", 2, 4, late, v=2, layers=4, cp=2, **OPTIMIZED),
    )


def test_grouped_products_of_experts() -> None:
    """Bitwise those of one expert after the other, fused or split, also where the distributed
    optimizer moves the weights."""
    late, fused = {"inject": LATE, "grouped": True}, {"split_backward": False, "grouped": True}
    check(
        2,
        case("grouped", 2, 3, late, fused, model=EXPERTS | SHARED, layers=2),
        case("grouped, bf16", 2, 3, late, fused, model=EXPERTS, layers=2, bf16=True),
        case("grouped, replicas", 1, 3, late, model=EXPERTS, layers=1, **OPTIMIZED),
        case("grouped, further tokens", 2, 3, late, layers=2, recompute="full",
             model=EXPERTS | {"mtp_num_layers": 1}),
    )  # fmt: skip


@pytest.mark.slow
def test_recordings_of_expert_parallel_stages(tmp_path: Path) -> None:
    """One recording per stage serves both replicas that share its experts."""
    order = str(tmp_path / "order")
    runs = {"inject": LATE, "record": order}, {"inject": "delay:1ms", "replay": order}
    check(4, case("ep2 v2", 2, 4, *runs, v=2, ep=2, layers=4, model=EXPERTS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["order.rank0", "order.rank1"]


@pytest.mark.slow
def test_five_seeds_of_delays_with_expert_parallelism() -> None:
    runs = [{"inject": f"delay:4ms,message-delay:{2 + seed}ms"} for seed in range(3)]
    runs += [{"inject": f"jitter:0.{3 + s},transient:2x:20%"} for s in range(2)]
    jitter = EXPERTS | {"moe_input_jitter_eps": 0.1}
    check(4, case("ep2 v2", 2, 6, *runs, v=2, ep=2, layers=4, model=jitter, dropout=0.1))


def seeds(count: int) -> list[dict[str, Any]]:
    """Runs of different delays."""
    late = [f"delay:4ms,message-delay:{2 + seed}ms" for seed in range(count // 2)]
    slow = [f"jitter:0.{3 + seed % 6},transient:{2 + seed // 6}x:20%" for seed in range(count // 2)]
    return [{"inject": how} for how in late + slow]


TWENTY = {
    "alltoall": {"ep": 2, "layers": 2, "model": EXPERTS},
    "allgather": {"ep": 2, "layers": 2, "model": EXPERTS | ALLGATHER},
    "v2 jitter": {"v": 2, "ep": 2, "layers": 4, "model": EXPERTS | {"moe_input_jitter_eps": 0.1}},
    "shared, optimizer": {"v": 2, "ep": 2, "layers": 4, "model": EXPERTS | SHARED, **OPTIMIZED},
    "global loss": {"layers": 2, "model": EXPERTS | GLOBAL},
    "sinkhorn": {
        "ep": 2,
        "layers": 2,
        "model": EXPERTS
        | {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    },
    "further tokens": {"ep": 2, "layers": 2, "model": EXPERTS | {"mtp_num_layers": 1}},
    "recompute": {"ep": 2, "layers": 2, "recompute": "full", "model": EXPERTS},
    "expert-tensor 2": {"etp": 2, "layers": 2, "model": EXPERTS},
    "cp2": {"v": 2, "cp": 2, "layers": 4},
    "cp2 ep2": {"cp": 2, "ep": 2, "layers": 2, "model": EXPERTS},
}


TWENTY_ON_EIGHT = {
    "tp2 ep2": {"v": 2, **TENSOR, "ep": 2, "etp": 1, "layers": 4, "model": EXPERTS},
    "ep4": {"v": 2, "ep": 4, "layers": 4, "model": EXPERTS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TWENTY, *TWENTY_ON_EIGHT])
def test_twenty_seeds_of_delays(name: str) -> None:
    """Every run is bitwise equal. Most take another order than Megatron's."""
    num_ranks, layout = (4, TWENTY[name]) if name in TWENTY else (8, TWENTY_ON_EIGHT[name])
    one = case(name, 2, 6, *seeds(20), **layout, iterations=1, deviates=11)
    check(num_ranks, one, timeout=900)


@pytest.mark.slow
def test_every_kind_of_expert_group() -> None:
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    sinkhorn = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
    two = {"ep": 2, "layers": 4}
    check(
        4,
        case("allgather", 2, 4, fused, late, **two, model=EXPERTS | ALLGATHER),
        case("expert-tensor 2", 2, 4, late, etp=2, layers=4, model=EXPERTS),
        case("global loss", 2, 4, late, layers=4, model=EXPERTS | GLOBAL),
        case("global loss, full", 2, 4, late, layers=4, recompute="full", model=EXPERTS | GLOBAL),
        case("global loss, ep2 v2", 2, 4, late, v=2, **two, model=EXPERTS | GLOBAL),
        case("sinkhorn", 2, 4, late, **two, model=EXPERTS | sinkhorn),
        case("shared experts", 2, 4, fused, late, v=2, **two, model=EXPERTS | SHARED),
    )


@pytest.mark.slow
def test_settings_with_expert_parallelism() -> None:
    fused, late = {"split_backward": False, "inject": LATE}, {"inject": LATE}
    biased = {
        "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
        "moe_z_loss_coeff": 1e-3,
    }  # fmt: skip
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    two = {"ep": 2, "layers": 4}
    check(
        4,
        case("further tokens", 2, 4, late, v=2, **two, model=EXPERTS | {"mtp_num_layers": 1}),
        case("optimizer", 2, 4, fused, late, v=2, **two, model=EXPERTS, **OPTIMIZED, dropout=0.1),
        case("router's bias", 2, 4, late, **two, model=EXPERTS | biased, **OPTIMIZED),
        case("full", 2, 4, late, v=2, **two, model=EXPERTS, recompute="full", dropout=0.1),
        case("selective", 2, 4, late, v=2, **two, model=EXPERTS, recompute="selective"),
        case("partial", 2, 4, late, **two, model=EXPERTS, partial=1),
        case("capacity", 2, 4, late, **two, model=EXPERTS | padded),
        case("fused weight gradients", 2, 4, late, **two, model=EXPERTS, fusion=True, overlap=True),
        case("one stage", 1, 4, fused, late, ep=4, layers=2, model=EXPERTS, dropout=0.1),
        case("cp2, ep2", 2, 4, late, cp=2, **two, model=EXPERTS),
        case("unlike lengths", 2, 4, fused, late, **two, model=EXPERTS | UNLIKE, lengths=True),
    )


@pytest.mark.slow
def test_expert_groups_on_eight_ranks() -> None:
    late, tensor = {"inject": LATE}, {"tp": 2, "sp": True}
    check(
        8,
        case("tp2 ep2", 2, 4, late, v=2, **tensor, ep=2, etp=1, layers=4, model=EXPERTS),
        case("tp2 ep2 etp2", 2, 4, late, v=2, **tensor, ep=2, layers=4, model=EXPERTS | ALLGATHER),
        case("ep4", 2, 4, late, v=2, ep=4, layers=4, model=EXPERTS, deviates=1),
        case("tp2 ep4", 2, 4, late, **tensor, ep=4, etp=1, layers=4, model=EXPERTS),
        case("ep2 dp4", 2, 4, late, v=2, ep=2, layers=4, model=EXPERTS, **OPTIMIZED),
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["depth-first", "breadth-first", "megatron"])
def test_every_policy(policy: str) -> None:
    run = {"policy": policy, "activation_cap": "4p", "inject": LATE}
    check(2, case("v1", 2, 6, run), case("v2", 2, 6, run, v=2))
