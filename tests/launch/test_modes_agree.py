"""Every mode trains the same model: from one checkpoint their losses are equal to 1e-5 in fp32."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.dpp_train.launch.main import plan
from tests.loop.several import corpus
from tests.parity.runs import train

SMALL = (
    "--procs 2 --num-layers 4 --hidden-size 64 --seq-length 64 --batch-size 8 "
    "--tokenizer-type NullTokenizer --vocab-size 100 "
    "--no-load-optim --lr 0.01 --eval-iters 0 --lr-decay-style constant --lr-warmup-fraction 0 "
)
MODES = {
    "simple": "--mode simple",
    "zero-3": "--mode zero --zero-stage 3",
}
MORE = {
    "3d": "--mode 3d --tp 1 --pp 2 --chunks 2",
    "tensor": "--mode 3d --tp 2",
    "planned": "--mode 3d --pp 2 --dpp-plan shapes",
    "static": "--mode 3d --pp 2 --no-dpp",
    "zero-1": "--mode zero --zero-stage 1",
    "zero-2": "--mode zero --zero-stage 2",
}


def losses(folder: Path, name: str, options: str) -> list[float]:
    """Of every iteration of a run of ``train``."""
    found = plan(shlex.split(f"{options} {SMALL} {corpus()}"))
    argv = [word for word in found.resolved.argv if word != "--estimate"]
    result = train(folder, name, found.devices.world_size, shlex.join(argv))
    return result.column("lm loss")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of two iterations of ``--mode simple``."""
    folder = tmp_path_factory.mktemp("modes")
    trained = losses(folder, "start", f"--mode simple --max-steps 2 --save {folder}/ckpt")
    assert trained[1] < trained[0]
    return folder


@pytest.fixture(scope="module")
def expected(start: Path) -> list[float]:
    """Losses of ``--mode simple`` after that."""
    return resumed(start, "simple", MODES["simple"])


def resumed(folder: Path, name: str, options: str) -> list[float]:
    return losses(folder, name, f"{options} --max-steps 4 --resume-from {folder}/ckpt")


@pytest.mark.parametrize(
    "name",
    ["zero-3", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)],
)
def test_modes_agree_from_one_checkpoint(name: str, start: Path, expected: list[float]) -> None:
    assert len(expected) == 2
    assert expected[0] != expected[1]
    found = resumed(start, name, {**MODES, **MORE}[name])
    assert found == pytest.approx(expected, rel=1e-5)
