"""One checkpoint goes on in every layout with the same numbers, and bitwise the same under the
dynamic schedule as under the static one.

Sums over tensor- and data-parallel ranks round differently, so layouts agree to 1e-5; the two
schedules of one layout add in the same order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.several import corpus
from tests.parity.runs import REPOSITORY, Result, train

DATA = REPOSITORY / "datasets_gpt"
FLAGS = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 "
    "--train-iters 3 --eval-iters 0 --transformer-impl local --device cpu "
    "--num-workers 0 --hidden-dropout 0 --attention-dropout 0 "
    f"--vocab-file {DATA / 'vocab.json'} --merge-file {DATA / 'merges.txt'} "
    "--padded-vocab-size 1536"
)
LAYOUTS = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp4-vpp2": (4, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "first-1": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
}
SPLIT, FUSED = "--use-dpp", "--use-dpp --no-dpp-split-backward"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A checkpoint of iteration 1, and the whole run in one process."""
    folder = tmp_path_factory.mktemp("start")
    more = ["--save", str(folder / "checkpoint"), "--save-interval", "1"]
    return folder / "checkpoint", train(folder, "whole", 1, f"{FLAGS} {corpus()}", *more)


def _resume(folder: Path, start: Path, layout: str, schedule: str) -> Result:
    ranks, more = LAYOUTS[layout]
    flags = f"{FLAGS} {corpus()} {more} {schedule} --load {start} --ckpt-step 1 --no-load-rng"
    if layout == "dp2":  # its state is not in a checkpoint of another optimizer
        flags += " --no-load-optim"
    name = f"{layout}-{''.join(word for word in schedule.split())}"
    return train(folder, name, ranks, flags)


def _compare(folder: Path, start: tuple[Path, Result], layout: str, schedules: list[str]) -> None:
    checkpoint, whole = start
    static = _resume(folder, checkpoint, layout, "")
    if layout != "dp2":  # without the optimizer's state the numbers are other ones
        assert static.column("lm loss") == pytest.approx(whole.column("lm loss")[1:], abs=1e-5)
        norms = whole.column("grad norm")[1:]
        assert static.column("grad norm") == pytest.approx(norms, rel=5e-4)
    for schedule in schedules:
        dynamic = _resume(folder, checkpoint, layout, schedule)
        assert dynamic.column("lm loss") == static.column("lm loss")
        assert dynamic.column("grad norm") == static.column("grad norm")
        assert dynamic.hashes == static.hashes


def test_pp2_goes_on_with_the_numbers_of_one_process(
    start: tuple[Path, Result], tmp_path: Path
) -> None:
    _compare(tmp_path, start, "pp2", [SPLIT])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_schedule(start: tuple[Path, Result], tmp_path: Path, layout: str) -> None:
    _compare(tmp_path, start, layout, [SPLIT, FUSED])
