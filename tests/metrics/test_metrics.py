"""The metrics of a run on ``megatron.training`` are the numbers that Megatron logs."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megatron.dpp.core import compat
from megatron.dpp.report.run_files import read_metrics
from tests.runtime.test_compat import SOURCES

SCRIPT = Path(__file__).with_name("mock_training.py")
FLAGS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 4
--lr 1e-3 --eval-iters 1 --eval-interval 2 --log-interval 1 --tokenizer-type NullTokenizer
--vocab-size 127 --distributed-backend gloo --transformer-impl local
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-persist-layer-norm --attention-dropout 0 --hidden-dropout 0
"""
NEEDED: dict[str, set[str]] = {
    "train_step": set(),
    "training_log": {"loss_dict", "iteration", "grad_norm", "learning_rate"},
    "evaluate": set(),
    "evaluate_and_print_results": {"prefix", "iteration"},
}


@pytest.mark.parametrize("archive", sorted(SOURCES.glob("*.tar.xz")) or [None])
def test_megatron_lm_has_the_functions(archive: Path | None) -> None:
    if archive is None:
        pytest.skip(f"no *.tar.xz of Megatron-LM in {SOURCES} (DPP_MEGATRON_SOURCES)")
    with tarfile.open(archive) as tar:
        name = next(name for name in tar if name.name.endswith("megatron/training/training.py"))
        file = tar.extractfile(name)
        assert file is not None
        tree = ast.parse(file.read())
    found = {
        node.name: {each.arg for each in node.args.args}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    assert {key.rpartition(":")[2] for key in compat.TRAINING} == NEEDED.keys()
    assert all(names <= found[function] for function, names in NEEDED.items())


def test_a_file_has_what_megatron_logs_but_for_the_step_of_a_full_disk(tmp_path: Path) -> None:
    """The disk is full in the second of four steps; the training goes on."""
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("there is no megatron.training")
    file = tmp_path / "new" / "metrics.jsonl"
    command = [sys.executable, "-m", "megatron.dpp.run", str(SCRIPT), "--metrics-file", str(file)]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [*command, *FLAGS.split()], env={**os.environ, **place, "FULL_DISK": str(file)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count(f"{file}: no metrics of this step ([Errno 27] File too large)") == 1
    assert len(file.read_text().splitlines()) == 8  # and 20 characters of the line that is lost
    lines = read_metrics(file)
    steps = [line for line in lines if "loss" in line]
    logged = re.findall(
        r"iteration +(\d+)/ +(\d+) .*learning rate: (\S+) .*lm loss: (\S+) .*grad norm: (\S+) ",
        done.stdout,
    )
    found = [
        (
            str(step["iteration"]), str(step["train_iters"]), f"{step['lr']:.6E}",
            f"{step['loss']:.6E}", f"{step['grad_norm']:.3f}",
        )
        for step in steps
    ]  # fmt: skip
    assert found == [logged[0], *logged[2:]] and [step["iteration"] for step in steps] == [1, 3, 4]
    assert {step["tokens"] for step in steps} == {4 * 16}
    assert all(0 < step["ms"] < 60_000 for step in steps)
    evaluated = re.findall(r"loss at iteration (\d+) .*?lm loss value: (\S+)", done.stdout)
    names = ("validation_loss", "test_loss")
    losses = [(line["iteration"], line[n], n) for line in lines for n in names if n in line]
    assert [(str(i), f"{loss:.6E}") for i, loss, _ in losses] == evaluated
    assert [name for *_, name in losses] == ["validation_loss"] * 3 + ["test_loss"]
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(lines))


def test_lost_curves_of_tensorboard_do_not_end_a_run(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from megatron.dpp_train.pretrain.mended import lossy_curves

    with lossy_curves(), pytest.warns(UserWarning, match="curves are not written"):
        writer = tensorboard.SummaryWriter(str(tmp_path / "curves"))
        shutil.rmtree(tmp_path / "curves")
        for step in range(3):
            writer.add_scalar("loss", 1.0, step)
            writer.flush()
        writer.close()
