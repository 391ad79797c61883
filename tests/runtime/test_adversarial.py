"""The real executor over drawn lengths, delays, bounds and choices: no run gets stuck.

All ranks of a pipeline run in threads over the fake network, whose clock jumps from event to event.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fake_network import FakeTransport, VirtualClock
from tests.runtime.pipelines import check_values, run_pipeline
from tests.schedule.pipelines import Pipeline, wild

LONGEST = 40


def drawn(seed: int, *, sliced: bool = False) -> dict[str, Any]:
    """Arguments of a pipeline at its least caps. With ``sliced`` its microbatches are linked, with
    keys; else its chunks may have weights, and further limits beside the cap.
    """
    rng = random.Random(seed)
    p, v, m = rng.randint(2, 4), rng.randint(1, 3), rng.randint(1, 6)
    policy = rng.choice((None, "dynamic", "depth-first", "megatron"))
    found: dict[str, Any] = {
        "p": p, "v": v, "policy": policy or wild(random.Random(seed)), "beta": rng.random(),
        "split": rng.random() < 0.5, "pieces": tuple(rng.randint(0, 3) for _ in range(v)),
    }  # fmt: skip
    if sliced:
        groups = tuple(rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(1, 4)))
        m, found["groups"], found["kappa"] = sum(groups), groups, rng.choice((0.0, 0.09, 0.35))
    else:
        weights = tuple(rng.choice((0.5, 1.0, 2.5)) for _ in range(v))
        found |= {
            "know": rng.choice(("start", "forward")), "heads": rng.random() < 0.3,
            "target": rng.choice((None, rng.randint(0, 3 * LONGEST))),
            "weights": weights if rng.random() < 0.5 else (),
        }  # fmt: skip
    sizes = [min(LONGEST, int(rng.lognormvariate(1.5, 1.2)) + 1) for _ in range(m)]
    return found | {"m": m, "sizes": sizes}


def delay(rng: random.Random, *_: Any) -> float:
    return rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.1)))


def check(seeds: range, *, sliced: bool = False) -> None:
    for seed in seeds:
        case = drawn(seed, sliced=sliced)
        p, v, m, lengths = (case[name] for name in ("p", "v", "m", "sizes"))
        rng = random.Random(seed)

        def spend(
            transport: FakeTransport, microbatch: int, rng: Any = rng, lengths: Any = lengths
        ) -> None:
            transport.wait(rng.choice((0.0, 0.001)) * lengths[microbatch])

        try:
            runners = run_pipeline(
                p, v, m, split=case["split"], delay=delay, seed=seed, timeout=60.0, lengths=lengths,
                schedulers=Pipeline(**case).ranks, clock=VirtualClock(), depth=1 + seed % 2,
                spend=spend,
            )  # fmt: skip
            check_values(runners, m, groups=case.get("groups", ()))
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("sliced", [False, True])
def test_random_pipelines_end(sliced: bool) -> None:
    """Backwards of a group of slices run in reverse order, at the least cap of it and its keys."""
    check(range(50), sliced=sliced)


@pytest.mark.slow
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_pipelines_end(part: int, sliced: bool) -> None:
    check(range(500 * part, 500 * (part + 1)), sliced=sliced)
