"""Whatever a host does to modules, parameters are the static run's, or the run is refused."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.cases import EXPERTS
from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("host_changes_worker.py")
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"v": 1, "layers": 4},
    {"v": 2, "layers": 4},
    {"v": 1, "layers": 4, "model": EXPERTS},
    {"v": 1, "layers": 4, "bare": True},
    {"v": 2, "layers": 4, "bare": True},
)
LOSSES = ("gradient_of_a_weight", "gradient_of_the_output", "own_backward", "noise")


def names() -> list[str]:
    """Of the changes, without an import of PyTorch into each of pytest's processes."""
    text = WORKER.with_name("host_changes.py").read_text()
    return [part.split("(")[0] for part in text.split("@change\ndef ")[1:]]


def run(examples: list[dict[str, Any]], timeout: float = 200, num_ranks: int = 2) -> dict[str, str]:
    """The outcome of each example."""
    ordered = sorted(examples, key=lambda example: example["v"])
    output = run_ranks(WORKER, num_ranks, [json.dumps(ordered)], timeout=timeout)
    lines = [line.split(" ", 2)[1:] for line in output.splitlines() if line.startswith("EXAMPLE")]
    found: dict[str, str] = dict(lines)
    assert found.keys() == {example["name"] for example in examples}
    assert not any(text.startswith("WRONG") for text in found.values()), found
    return found


SAID = {
    "replace_the_product_of_a_layer": "its _forward_impl was replaced",
    "replace_the_products_in_a_forward": "megatron-core's product is replaced in a call",
    "call_with_another_weight": "its class is Counting",
    "swap_the_weight_of_a_call": "a call gets another weight",
    "hook_the_backward": "has backward hooks",
    "hook_a_weight": "its weight has hooks",
    "hook_a_weight_after_accumulation": "its weight has hooks",
    "patch_the_autograd_function": "or its autograd function, was replaced",
    "tie": "its weight is tied",
    "parametrise": "its class is Parametrized",
    "quantise": "its class is Quant",
    "subclass": "its class is Halved",
}
"""The line by which a layer goes its own way; other changes leave a layer as it is."""


def test_each_change_alone() -> None:
    """Made after the first step, on one layer of each rank, or on many. Only ties need two."""
    examples = [
        {"name": name, "changes": [[name, 1, 0]], "shows": True, "v": 1, "steps": 2,
         "layers": 4 if name == "tie" else 2, "bare": name == "make_gradients_views_of_a_buffer"}
        for name in names()
    ]  # fmt: skip
    two = {"changes": [], "v": 1, "layers": 2, "steps": 2}
    examples += [{"name": name, "losses": [name], **two} for name in LOSSES]
    chunks = {"v": 2, "layers": 4}
    examples += [
        {"name": "noise_v2", "losses": ["noise"], "changes": [], **chunks},
        {"name": "draw_noise_v2", "changes": [["draw_noise", 0, 0]], **chunks},
    ]
    found = run(examples)
    assert "gradient of decoder.layers" in found.pop("gradient_of_a_weight")
    assert found.pop("noise_v2") == found.pop("draw_noise_v2") == "told"
    refused = found.pop("use_a_weight_elsewhere")
    assert "DppConfig(split_backward=...): decoder.layers." in refused
    assert "is also used outside of its layer's own product" in refused
    for name, text in found.items():
        assert text.startswith("equal"), f"{name} {text}"
        assert ("is computed within B" in text) is (name in SAID), f"{name} {text}"
        assert SAID.get(name, "") in text


@pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="needs NVIDIA's nvidia-modelopt"
)
@pytest.mark.parametrize("when", [0, 1])
def test_a_model_that_modelopt_has_quantised(when: int) -> None:
    """Its weights are rounded in each product, which a split backward left out."""
    changes = [["quantise_with_modelopt", when, 0]]
    found = run([{"name": "int8", "changes": changes, "shows": True, **LAYOUTS[0]}])
    assert found["int8"].startswith("equal")
    assert "is computed within B: its class is Quant" in found["int8"]


def combinations(number: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "name": f"{seed}/{index}",
            "changes": [
                [rng.choice(names()), rng.randrange(3), rng.randrange(100)]
                for _ in range(rng.randint(1, 4))
            ],
            "late": rng.random() < 0.2,
            "losses": rng.sample(LOSSES, rng.choice((0, 0, 1, 2))),
            **rng.choice(LAYOUTS),
        }
        for index in range(number)
    ]


def test_random_combinations() -> None:
    run(combinations(6, 0))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_many_random_combinations(num_ranks: int) -> None:
    """The numbers are the static schedule's, or a line or an error says why not."""
    found = run(combinations(100, random.randrange(10**6)), timeout=2000, num_ranks=num_ranks)
    outcomes = [text.split()[0].strip(",:") for text in found.values()]
    print(f"{num_ranks} ranks:", *(f"{outcomes.count(one)} {one}" for one in set(outcomes)))
