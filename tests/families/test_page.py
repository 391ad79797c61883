"""The page of families holds the tables of today, and estimates count all parameters."""

from __future__ import annotations

import pytest

from megatron.dpp_train.cost.from_flags import shape_of
from megatron.dpp_train.cost.memory import model_parameters
from megatron.dpp_train.families import find_families
from megatron.dpp_train.families.page import PAGE, written
from megatron.dpp_train.hf.fields import parse_config
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate
from tests.hf import tiny

_RUN = (
    "--transformer-impl local --micro-batch-size 1 --global-batch-size 1 --mock-data --lr 1 "
    "--train-iters 1 --eval-iters 0 --seq-length 32 --device cpu"
)


def test_the_page_has_the_tables_of_today() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run python -m megatron.dpp_train.families.page"


def test_each_family_is_tested() -> None:
    assert set(tiny.MODELS) == set(find_families())


@pytest.mark.parametrize("family", [name for name in tiny.MODELS if name != "glm4_moe"])
def test_an_estimate_counts_all_parameters(family: str) -> None:
    config = parse_config(tiny.config_of(family), "config.json")
    args = validate(parse_args([*_RUN.split(), *config.words()]), 1, "gpt")
    wanted = tiny.num_parameters(config.family, config.sizes)
    assert model_parameters(shape_of(args, on_gpu=False)) == wanted
