"""Experts and cut sequences train as with the static schedule, to the last bit.

Ranks that share experts or a sequence meet in every task, so they must run one order. See
test_equality.py for the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.report.align import align
from megatron.dpp.report.analysis.summary import analyse
from megatron.dpp.report.reader import open_run
from tests.runtime.cases import (
    ALLGATHER,
    EXPERTS,
    FUSED_GRAPHS,
    GLOBAL,
    LATE,
    LATE_GRAPHS,
    OPTIMIZED,
    PADDED,
    SHARED,
    TENSOR,
    UNLIKE,
    case,
    check,
)

ALONE = {"moe_shared_expert_intermediate_size": 32}
fused, late = {"split_backward": "off", "inject": LATE}, {"inject": LATE}
LEARNED = {"positions": "learned_absolute"}
"""megatron-core's rotary embeddings cut each document of a packed row, these tests whole rows."""


def test_captured_experts_and_the_attention_before_them() -> None:
    """Experts of a padded capacity are captured whole."""
    late, fused, static = LATE_GRAPHS, FUSED_GRAPHS, {"static": True, "cuda_graphs": "on"}
    padded: dict[str, Any] = {"layers": 2, "iterations": 4, "model": PADDED}
    jitter, routes = {"moe_input_jitter_eps": 0.1}, {"moe_router_force_load_balancing": True}
    check(
        2,
        case("padded", 2, 3, late, fused, **padded),
        case("jitter", 2, 3, late, **padded | {"model": PADDED | jitter}),
        case("random routes", 2, 3, late, **padded | {"model": PADDED | routes}),
        case("attention", 2, 4, late, fused, static, v=2, layers=8, iterations=4, model=EXPERTS,
             dropout=0.1),
        case("shared", 2, 3, late, fused, layers=2, iterations=4, model=EXPERTS | ALONE),
    )  # fmt: skip


@pytest.mark.slow
def test_captured_experts_of_further_layouts() -> None:
    late, fused = LATE_GRAPHS, FUSED_GRAPHS
    biased = PADDED | {
        "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
        "moe_z_loss_coeff": 1e-3, **ALONE,
    }  # fmt: skip
    told = {"layers": 4, "iterations": 4}
    check(
        4,
        case("ep2 v2", 2, 4, late, fused, v=2, ep=2, **told, model=PADDED, dropout=0.1),
        case("ep2, bias", 2, 4, late, ep=2, **told, model=biased, **OPTIMIZED),
        case("ep2, selective", 2, 3, late, ep=2, **told, model=PADDED, recompute="selective"),
        case("tp2", 2, 4, late, v=2, **TENSOR, **told, model=PADDED),
    )


@pytest.mark.gpu
def test_graphs_of_padded_experts() -> None:
    static, dynamic = ({"static": static, "cuda_graphs": "on"} for static in (True, False))
    fused = dynamic | {"split_backward": "off"}
    told = {"layers": 3, "iterations": 4, "model": PADDED, "bf16": True}
    check(
        1,
        case("experts", 1, 3, static, dynamic, fused, **told),
        case("dropout, selective", 1, 3, static, dynamic, **told, dropout=0.1,
             recompute="selective"),
    )  # fmt: skip


def test_expert_parallel() -> None:
    """Replicas whose experts are apart meet in every forward and backward."""
    check(
        4,
        case("ep2 v2", 2, 4, late, v=2, ep=2, layers=4, model=EXPERTS | SHARED,
             dropout=0.1, deviates=1, **OPTIMIZED),
        case("ep2, allgather", 2, 4, late, ep=2, layers=2, model=EXPERTS | ALLGATHER),
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
        rows = analysis.experts
        assert [(row.layer, row.imbalance) for row in rows] == [(1, 4.0), (2, 4.0)]
        assert {row.rank_imbalance for row in rows} == {2.0}
        assert all(row.group_size == 2 for row in rows)


def test_context_parallel() -> None:
    """Also the losses and gradients of the same sequences on one rank each."""
    told = {"cp": 2, "per_token": True, "uncut": True, "positions": "rope"}
    check(
        4,
        case("cp2", 2, 4, late, v=2, layers=4, **told, deviates=1),
        case("cp2, packed", 2, 3, late, layers=2, **told | LEARNED, packed="together",
             model=UNLIKE | {"num_query_groups": 2}),
        case("cp2, dropout", 2, 3, late, cp=2, layers=2, dropout=0.1,
             recompute="full"),
    )  # fmt: skip


CUT = {"per_token": True, "uncut": True, "positions": "rope"}
PLAIN_EXPERTS = EXPERTS | {"moe_aux_loss_coeff": 0.0}


@pytest.mark.slow
def test_context_parallel_in_further_layouts() -> None:
    two = {"cp": 2, **CUT}
    packed = two | LEARNED | {"packed": "together", "model": UNLIKE}
    check(
        4,
        case("full", 2, 4, fused, late, v=2, layers=4, **two, recompute="full"),
        case("selective", 2, 3, late, layers=2, **two, recompute="selective"),
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
    packed = CUT | LEARNED | {"packed": "together", "model": UNLIKE}
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


@pytest.mark.slow
def test_recordings_of_expert_parallel_stages(tmp_path: Path) -> None:
    """One recording per stage serves both replicas that share its experts."""
    order = str(tmp_path / "order")
    runs = {"inject": LATE, "record": order}, {"inject": "delay:1ms", "replay": order}
    check(4, case("ep2 v2", 2, 4, *runs, v=2, ep=2, layers=4, model=EXPERTS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["order.rank0", "order.rank1"]


def seeds(count: int) -> list[dict[str, Any]]:
    """Runs of different delays."""
    late = [f"delay:4ms,message-delay:{2 + seed}ms" for seed in range(count // 2)]
    slow = [f"jitter:0.{3 + seed % 6},transient:{2 + seed // 6}x:20%" for seed in range(count // 2)]
    return [{"inject": how} for how in late + slow]


TWENTY = {
    "alltoall": {"ep": 2, "layers": 2, "model": EXPERTS},
    "allgather": {"ep": 2, "layers": 2, "model": EXPERTS | ALLGATHER},
    "v2 jitter": {
        "v": 2,
        "ep": 2,
        "layers": 4,
        "model": EXPERTS | {"moe_input_jitter_eps": 0.1},
        "dropout": 0.1,
    },
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
    biased = {
        "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
        "moe_z_loss_coeff": 1e-3,
    }  # fmt: skip
    two = {"ep": 2, "layers": 4}
    check(
        4,
        case("further tokens", 2, 4, late, v=2, **two, model=EXPERTS | {"mtp_num_layers": 1}),
        case("optimizer", 2, 4, fused, late, v=2, **two, model=EXPERTS, **OPTIMIZED, dropout=0.1),
        case("router's bias", 2, 4, late, **two, model=EXPERTS | biased, **OPTIMIZED),
        case("full", 2, 4, late, v=2, **two, model=EXPERTS, recompute="full", dropout=0.1),
        case("selective", 2, 4, late, v=2, **two, model=EXPERTS, recompute="selective"),
        case("partial", 2, 4, late, **two, model=EXPERTS, partial=1),
        case("capacity", 2, 4, late, **two, model=PADDED),
        case("fused weight gradients", 2, 4, late, **two, model=EXPERTS, fusion=True, overlap=True),
        case("one stage", 1, 4, fused, late, ep=4, layers=2, model=EXPERTS, dropout=0.1),
        case("cp2, ep2", 2, 4, late, cp=2, **two, model=EXPERTS),
        case("unlike lengths", 2, 4, fused, late, **two, model=EXPERTS | UNLIKE, lengths=True),
    )


@pytest.mark.slow
def test_expert_groups_on_eight_ranks() -> None:
    check(
        8,
        case("tp2 ep2", 2, 4, late, v=2, **TENSOR, ep=2, etp=1, layers=4, model=EXPERTS),
        case("tp2 ep2 etp2", 2, 4, late, v=2, **TENSOR, ep=2, layers=4, model=EXPERTS | ALLGATHER),
        case("ep4", 2, 4, late, v=2, ep=4, layers=4, model=EXPERTS, deviates=1),
        case("tp2 ep4", 2, 4, late, **TENSOR, ep=4, etp=1, layers=4, model=EXPERTS),
        case("ep2 dp4", 2, 4, late, v=2, ep=2, layers=4, model=EXPERTS, **OPTIMIZED),
    )
