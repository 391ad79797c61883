"""Slices have the numbers of uncut microbatches to fp32's rounding, and those of their own static
order to the last bit, whatever order they run in.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.runtime import cases
from tests.runtime.cases import EXPERTS, OPTIMIZED, TENSOR, UNLIKE, case
from tests.runtime.launcher import shared_gpus

check = partial(cases.check, worker=Path(__file__).with_name("slices_worker.py"))
RANDOM = {"policy": "tests.runtime.slices_worker:AtRandom"}
LATE = "delay:2ms,message-delay:3ms"
"""Slices are tasks of their own, of which there are several times as many."""
LATE_RUN, FUSED = ({"inject": LATE, "split_backward": how} for how in ("on", "off"))
PACKED = {"positions": "rope", "model": UNLIKE | {"num_query_groups": 2}}
ROTARY = {"positions": "rope", "model": {"num_query_groups": 2}}


def test_two_ranks_in_slices() -> None:
    check(
        2,
        case("rotary, groups", 2, 3, LATE_RUN, RANDOM, slices=4, **ROTARY, layers=2),
        case("v2, learned", 2, 4, FUSED, {"host": True}, LATE_RUN, slices=6, v=2, layers=4,
             per_token=True),
        case("full", 2, 2, LATE_RUN, slices=8, recompute="full", **ROTARY),
        case("packed rows", 2, 4, LATE_RUN, FUSED, RANDOM, rows=True, per_token=True, **PACKED,
             layers=2),
        case("selective, own", 2, 3, LATE_RUN, slices=4, recompute="selective", untied=True,
             spec="megatron", layers=2),
    )  # fmt: skip


@pytest.mark.gpu
def test_two_ranks_in_slices_on_gpus() -> None:
    check(
        2,
        case("rotary, groups", 2, 3, LATE_RUN, FUSED, RANDOM, slices=4, **ROTARY),
        case("v2, learned", 2, 4, LATE_RUN, slices=6, v=2, layers=4, per_token=True),
        case("full", 2, 2, LATE_RUN, slices=8, recompute="full", **ROTARY),
        place=shared_gpus, fresh=True,
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_in_further_slices() -> None:
    check(
        2,
        case("five slices", 2, 4, LATE_RUN, RANDOM, slices=3, v=2, layers=4, **ROTARY),
        case("packed rows, v2", 2, 4, LATE_RUN, FUSED, RANDOM, rows=True, v=2, layers=4, **PACKED),
        case("packed rows, full", 2, 4, LATE_RUN, rows=True, recompute="full", **PACKED),
        case("dropout", 2, 3, LATE_RUN, slices=4, dropout=0.1),
        case("experts", 2, 3, LATE_RUN, slices=4, model=EXPERTS | {"moe_aux_loss_coeff": 0.0}),
        case("balanced experts", 2, 3, LATE_RUN, slices=4, model=EXPERTS, balances=True),
        case("between", 2, 3, LATE_RUN, slices=4, between=True, spec="host"),
        case("one stage", 1, 2, LATE_RUN, slices=4, untied=True),
    )


@pytest.mark.slow
def test_four_ranks_in_slices() -> None:
    check(
        4,
        case("p4v2", 4, 4, LATE_RUN, RANDOM, slices=4, v=2, layers=8),
        case("p4", 4, 4, LATE_RUN, slices=6, layers=4, **ROTARY),
        case("tp2", 2, 3, LATE_RUN, slices=4, layers=4, **TENSOR),
        case("dp2", 2, 3, LATE_RUN, slices=4, layers=4, **OPTIMIZED),
    )
