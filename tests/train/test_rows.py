"""Documents as rows on Megatron's loop: equal numbers in every schedule, and in every kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.data.test_batches import LENGTHS, write_chats
from tests.train.runs import MODEL, Result, train

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="megatron-core has its training loop for Python 3.12 on"
)
ROWS = "--overlong cut --calculate-per-token-loss"
PP2 = "--pipeline-model-parallel-size 2"
CHUNKS = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
DYNAMIC = "--use-dpp --dpp-strict"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01"
EXPERTS += " --disable-bias-linear --swiglu"
CASES = {
    "packed": (2, f"--rows packed {CHUNKS}"),
    "as they are": (2, f"--rows as-they-are {PP2} --dpp-activation-cap static"),
    "padded": (2, f"--rows padded {PP2}"),
    "packed, replicas": (4, f"--rows packed {PP2} --use-distributed-optimizer"),
    "packed, tensors": (
        4,
        f"--rows packed {PP2} --tensor-model-parallel-size 2 "
        "--position-embedding-type rope --no-rope-fusion",
    ),
    "experts": (2, f"--rows as-they-are {PP2} {EXPERTS}"),
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chats")
    return f"--data-path {write_chats(folder / 'x', LENGTHS * 2)} {ROWS}"


def plain(flags: str) -> str:
    """The flags without those of the dynamic pipeline."""
    return flags.replace("--dpp-activation-cap static", "")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.slow] * ("packed" != name != "as they are"))
     for name in CASES],
)  # fmt: skip
def test_dynamic_is_static_bit_by_bit(case: str, chats: str, tmp_path: Path) -> None:
    ranks, flags = CASES[case]
    static = train(tmp_path, ranks, MODEL, chats, plain(flags))
    dynamic = train(tmp_path, ranks, MODEL, chats, flags, DYNAMIC)
    assert len(static.numbers) == 5 and dynamic.numbers == static.numbers


@pytest.mark.parametrize(
    ("kinds", "more"),
    [(("padded", "as-they-are", "packed"), ""), (("padded", "as-they-are"), EXPERTS)],
)  # experts' losses weigh microbatches alike, which packing forms anew
def test_every_kind_trains_alike(
    kinds: tuple[str, ...], more: str, chats: str, tmp_path: Path
) -> None:
    """Up to the order of sums; routers leave padding out of their balance."""
    runs = [train(tmp_path, 1, MODEL, chats, f"--rows {kind} {more}") for kind in kinds]
    first, *others = [(run.column("loss")[0], run.column("grad_norm")[0]) for run in runs]
    assert all(each == pytest.approx(first, rel=1e-5) for each in others)


def test_a_run_resumes_in_the_middle_of_an_epoch(chats: str, tmp_path: Path) -> None:
    flags = f"--rows packed {PP2} {DYNAMIC}"
    save = f"--save {tmp_path / 'saved'} --save-interval 2 --ckpt-format torch_dist"
    whole = train(tmp_path, 2, MODEL, chats, flags, save)
    load = f"--load {tmp_path / 'saved'} --ckpt-step 2"
    rest: Result = train(tmp_path, 2, MODEL, chats, flags, load)
    assert rest.numbers == whole.numbers[-3:]
