"""Loops in the forms of hosts give the same numbers under the plugin's schedule, bit by bit.

Each test starts its ranks once. The dynamic runs have delays, so that they take another order.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.hosts import NEWEST, Hosts
from tests.runtime import cases
from tests.runtime.cases import LATE, OPTIMIZED, UNLIKE
from tests.runtime.launcher import REPOSITORY

MOST = 2 * 16
"""Tokens of a microbatch of the worker's."""


def case(name: str, loop: str, *runs: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """A case of two stages x two chunks, if ``layout`` names no others."""
    given = {"v": 2, "m": 2, "layers": 4, "spec": "host", "loop": loop} | layout
    return cases.case(name, 2, given.pop("m"), *(runs or [{"inject": LATE}]), **given)


EARLY = {"overlap": True}
FUSED = {"split_backward": "off", "inject": LATE}
TOLD = {"max_tokens": MOST, "inject": LATE}
ACCUMULATES = [
    case("outer", "accumulates", holds="outer", **OPTIMIZED),
    case("functions", "accumulates", holds="functions", **EARLY),
    case("nothing, wrapped", "accumulates", holds="nothing", wrapped=True, **EARLY),
]
"""Several calls per optimizer step: NeMo-RL's form, and others that leave it to the host."""
FURTHER = [
    case("null", "accumulates", holds="null", **EARLY),
    case("after static calls", "accumulates", holds="nothing", steps=3, static_calls=[0, 1, 4],
         **EARLY),
    case("no overlap", "accumulates", holds="outer"),
    case("outer v1", "accumulates", holds="outer", v=1, m=3, calls=3, steps=3, **EARLY),
    case("slime, replicas", "slime", **OPTIMIZED),
    case("slime, at the end", "slime"),
    case("bridge, replicas", "bridge", **OPTIMIZED),
    case("bridge, gather", "bridge", gather=True, **OPTIMIZED),
    case("frozen in turns", "freezes", turns=["linear_fc1"], distributed_optimizer=True),
]  # fmt: skip
"""With two replicas."""
VERL = [
    case("verl", "verl", TOLD, model=UNLIKE),
    case("verl v1", "verl", TOLD, v=1, model=UNLIKE, critic=24),
]
"""An actor, its reference and a wider critic: lengths are nominal, weights leave between turns."""
EXCHANGED = [case("slime", "slime"), case("slime v1", "slime", v=1), case("bridge", "bridge")]
"""Functions that a host sets and clears between steps, losses that count tokens."""
REPLAYS = [
    case("replays", "replays", m=8),
    case("asked for", "replays", {"call_order": "megatron", "inject": LATE}, m=8,
         told=False),
]  # fmt: skip
"""A model whose routers replay, and a host that asks for megatron-core's order of calls."""
FREEZES = [
    case("layers", "freezes", {"inject": LATE}, FUSED, turns=["linear_fc1", "linear_qkv"]),
    case("all but adapters", "freezes", turns=["embedding"], frozen=["mlp", "layernorm"]),
    case("a stage", "freezes", turns=[""], stage=0),
    case("the last stage", "freezes", turns=["layers"], stage=1, v=1),
]
"""Weights, and whole stages, that a host freezes every other step."""
FAILS = [
    case("a rank fails", "slime", fails=[({}, 1, "of the host's own")]),
    case("too many tokens", "verl", TOLD, v=1, model=UNLIKE, critic=24,
         fails=[({"max_tokens": MOST // 2}, 0, f"a microbatch has {MOST} tokens")]),
]  # fmt: skip
"""The run after a failed one is as if there had been none."""


check = partial(cases.check, worker=Path(__file__).with_name("worker.py"))


@pytest.mark.parametrize(
    ("num_ranks", "forms"),
    [(4, ACCUMULATES), (2, VERL), (2, EXCHANGED), (2, REPLAYS + FREEZES), (2, FAILS)],
)
def test_loops_have_the_numbers_of_megatron_cores_schedule(num_ranks: int, forms: Any) -> None:
    check(num_ranks, *forms)


@pytest.mark.slow
def test_two_replicas_of_further_hosts() -> None:
    check(4, *FURTHER)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_newest_megatron_core(hosts: Hosts, num_ranks: int) -> None:
    root = hosts.unpacked(NEWEST)
    path = [root, REPOSITORY, root.parent, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    given = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    forms = {2: VERL + EXCHANGED + REPLAYS + FREEZES + FAILS, 4: ACCUMULATES + FURTHER}
    check(num_ranks, *forms[num_ranks], place=lambda _: ("", given), fresh=True)
