"""A long pre-training: a blend of ten corpora, a ramp of batch sizes, replicas that come and go.

Unmodified Megatron-LM core_v0.16.1 printed the numbers on a CPU, with two processes, for these
flags and corpora. Its own resume with another number of replicas needs GPUs.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.dpp_train.data.token_files import Documents, TokenFileWriter, token_type
from tests.parity.runs import Result, train

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --no-rope-fusion --lr 1e-2 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 127 "
    "--num-workers 0 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --split 1,0,0 "
    "--seed 7 --micro-batch-size 1 --transformer-impl local --lr-warmup-samples 10 "
    "--lr-decay-samples 84 --weight-decay 0.1 --rampup-batch-size 4 4 24 --global-batch-size 12 "
    "--train-samples 84 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --device cpu"
)
LOSSES = (
    4.864673137664795, 4.862646579742432, 4.828036785125732, 4.816987037658691, 4.735135078430176,
    4.611482620239258, 4.492076396942139, 4.3521857261657715, 4.318113327026367,
)  # fmt: skip
NORMS = (
    2.1417484283447266, 1.8871270418167114, 1.5473371744155884, 1.0410563945770264,
    0.9000194668769836, 0.8938677310943604, 0.7651792168617249, 0.888584315776825,
    0.8813422322273254,
)  # fmt: skip
MIDDLE = 4
"""The first of the two iterations with the ramp's second batch size."""


def blend(folder: Path) -> str:
    """``--data-path`` of ten corpora of unlike size with weights; small ones repeat."""
    draw, dtype, words = random.Random(5), token_type(128), []
    for number in range(10):
        prefix = folder / f"c{number}"
        sizes = [draw.randrange(5, 90) for _ in range(8 + 6 * number)]
        ids = [draw.randrange(12 * number, 12 * number + 12) for _ in range(sum(sizes))]
        file = TokenFileWriter(Path(f"{prefix}.bin"), dtype)
        file.add(Documents.of(ids, sizes, [1] * len(sizes), dtype))
        file.finish(Path(f"{prefix}.idx"))
        words += [f"{0.02 + 0.02 * (9 - number):.2f}", str(prefix)]
    return f"--data-path {' '.join(words)}"


def check(result: Result, first: int) -> None:
    """The numbers of a run from iteration ``first`` on are Megatron-LM's."""
    assert result.column("lm loss") == pytest.approx(LOSSES[first - 1 :], abs=2e-6)
    assert result.column("grad norm") == pytest.approx(NORMS[first - 1 :], rel=1e-4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint of two replicas in the middle of the ramp, and the flags of their run."""
    folder = tmp_path_factory.mktemp("ramp")
    flags, checkpoint = f"{FLAGS} {blend(folder)}", folder / "checkpoint"
    save = f"--save {checkpoint} --save-interval {MIDDLE}"
    check(train(folder, "two", 2, f"{flags} {save}"), 1)
    return checkpoint, flags


@pytest.mark.parametrize("replicas", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_ramp_over_a_blend_goes_on_with_other_numbers_of_replicas(
    saved: tuple[Path, str], replicas: int, tmp_path: Path
) -> None:
    checkpoint, flags = saved
    load = f"--load {checkpoint} --ckpt-step {MIDDLE}"
    check(train(tmp_path, "resumed", replicas, f"{flags} {load}"), MIDDLE + 1)
