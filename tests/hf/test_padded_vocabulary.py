"""Rows that pad the vocabulary of a loaded model are no tokens, and no loss counts them."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.distributed.checkpoint import FileSystemReader, load

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint.files import find_named
from megatron.dpp_train.generate import evaluate_command as evaluate
from megatron.dpp_train.hf import convert_command as convert
from megatron.dpp_train.hf.fields import ORIGIN
from megatron.dpp_train.hf.files import tokens_of
from megatron.dpp_train.preflight import check as preflight
from tests.hf import tiny
from tests.loop.several import FLAGS, corpus, train_each
from tests.parity.runs import Result

TOKENS = 101
"""An odd number, of which two tensor-parallel ranks cannot hold equal shares."""
PIPELINE = f"--padded-vocab-size {TOKENS} --pipeline-model-parallel-size 2 --use-dpp"
TENSOR = "--padded-vocab-size 102 --tensor-model-parallel-size 2"
LOGIT = -80.0
Runs = dict[str, Result]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with logits of about -80, as its real weights have: beside them, 0 is certain."""
    folder = tiny.make("gpt2", tmp_path_factory.mktemp("gpt2"), vocab_size=TOKENS)
    model = tiny.load(folder)
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(2.0)
        weight = model.transformer.wte.weight
        weight += LOGIT / (2.0 * weight.shape[1])
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """Two steps in several layouts, and two further ones from a checkpoint without the folder. The
    directory of all, and their results."""
    folder = tmp_path_factory.mktemp("runs")
    words = " ".join(tiny.words(gpt2)).replace(f"--padded-vocab-size {TOKENS}", "")
    words += " --hidden-dropout 0 --attention-dropout 0 --lr-decay-style constant --lr 1e-5"
    words += " --eval-iters 1 --eval-interval 2"
    begin = f"{words} --load-hf {gpt2} --train-iters 2 --save-interval 2"
    go_on = f"{words} --load DIR/pipeline --train-iters 4 --no-load-optim"
    fused = "--bf16 --cross-entropy-loss-fusion"
    chunks = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-dpp"
    runs = {
        "pipeline": f"{begin} {PIPELINE} --save DIR/pipeline --save-hf DIR/pipeline-hf",
        "tensor": f"{begin} {TENSOR} --save DIR/tensor --save-hf DIR/tensor-hf",
        "chunks": f"{begin} {chunks} --padded-vocab-size 256",
        "sequence": f"{begin} {TENSOR} --padded-vocab-size 256 --sequence-parallel",
        "on-pipeline": f"{go_on} {PIPELINE}",
        "on-tensor": f"{go_on} {TENSOR} --vocab-size 99 --save DIR/on-tensor --save-interval 2",
        "added": f"{begin} {TENSOR} --vocab-size 101 --save DIR/added --save-hf DIR/added-hf",
        "bf16-tensor": f"{begin} {fused} {TENSOR}",
    }
    return folder, train_each(folder, 2, runs)


@pytest.mark.timeout(180)
def test_losses_do_not_depend_on_the_padding(trained: tuple[Path, Runs]) -> None:
    """They were 8 without and 82 to 85 with padding; gradients and evaluations were others, too."""
    _, found = trained
    for names, tolerance in (
        (["pipeline", "tensor", "chunks", "sequence"], 1e-5),
        (["on-pipeline", "on-tensor"], 1e-5),
        (["pipeline", "bf16-tensor"], 5e-2),
    ):
        first, *rest = (losses_of(found[name]) for name in names)
        assert max(first) < 10
        for name, losses in zip(names[1:], rest, strict=True):
            assert losses == pytest.approx(first, rel=tolerance), name


def losses_of(result: Result) -> list[float]:
    """Losses and norms of the gradients of training, and losses of evaluations."""
    tried = [row["lm loss"] for row in result.evaluations]
    return [*result.column("lm loss"), *result.column("grad norm"), *tried]


@pytest.mark.filterwarnings("ignore:torch.distributed is :UserWarning")
def test_padding_stays_zero_and_is_not_exported(trained: tuple[Path, Runs]) -> None:
    folder, _ = trained
    table = torch.full((102, 32), float("nan"))
    reader = FileSystemReader(str(folder / "tensor" / "iter_0000002"))
    state = {"embedding.word_embeddings.weight": table}
    load(state, storage_reader=reader)
    assert table[:TOKENS].all() and not table[TOKENS:].any()
    ours, theirs = (tiny.load(folder / f"{name}-hf") for name in ("pipeline", "tensor"))
    both = zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
    for (name, tensor), other in both:
        assert torch.allclose(tensor, other, atol=1e-6), name


def test_an_evaluation_counts_the_tokens_that_training_counted(
    trained: tuple[Path, Runs], gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a checkpoint that names no folder, and whose tokenizer has fewer tokens than the model."""
    folder, _ = trained
    words = [str(folder / "on-tensor"), "--data", str(folder / "tokens"), "--limit", "3", "--json"]
    assert evaluate.main(words) == 0
    found = json.loads(capsys.readouterr().out)["loss"]
    target = folder / "on-hf"
    assert convert.main([str(folder / "on-tensor"), str(target), "--like", str(gpt2)]) == 0
    ids = torch.stack([(torch.arange(40) * each + each) % 100 for each in range(3)])
    with torch.no_grad():
        loss = tiny.load(target)(input_ids=ids, labels=ids).loss
    assert found == pytest.approx(float(loss), rel=1e-6)


def counted(words: str) -> int | None:
    """The tokens that the loss of a run counts; None for all rows of its model."""
    args, _ = preflight.check("gpt", f"{FLAGS} {corpus()} --train-iters 1 {words}".split(), 1)
    found: int | None = args.loss_vocab_size
    return found


def test_only_a_loaded_model_leaves_padding_out(gpt2: Path, tmp_path: Path) -> None:
    """From random parameters Megatron counts it."""
    model = " ".join(tiny.words(gpt2)).replace(f"--padded-vocab-size {TOKENS}", "")
    assert counted(model) is None
    assert counted(f"{model} --load-hf {gpt2}") == TOKENS
    assert counted(f"{model} --load-hf {gpt2} --vocab-size {TOKENS + 3}") == TOKENS + 4
    assert convert.main([str(gpt2), str(tmp_path / "converted")]) == 0
    assert counted(f"{model} --pretrained-checkpoint {tmp_path}/converted") == TOKENS


def test_a_checkpoint_that_does_not_say_has_its_folders_tokens(gpt2: Path, tmp_path: Path) -> None:
    """As those have that earlier versions saved, and DeepSpeed's."""
    ours = tmp_path / "converted"
    assert convert.main([str(gpt2), str(ours)]) == 0
    found = find_named(ours)
    assert found is not None
    assert tokens_of(found, Namespace()) == TOKENS
    shutil.rmtree(ours / ORIGIN)
    assert tokens_of(found, Namespace()) is None
    assert tokens_of(found, Namespace(load_hf=str(gpt2))) == TOKENS


def test_data_with_a_token_of_the_padding_is_refused(gpt2: Path, tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/data.bin", dtype=numpy.uint16)
    for _ in range(20):
        builder.add_document(torch.full((40,), TOKENS), [40])
    builder.finalize(f"{tmp_path}/data.idx")
    words = " ".join(tiny.words(gpt2)).replace(f"--padded-vocab-size {TOKENS}", "")
    words = f"{FLAGS} {words} --train-iters 1 --data-path {tmp_path}/data --split 8,1,1"
    preflight.check("gpt", words.split(), 1)
    with pytest.raises(DataError, match=f"token id {TOKENS} .* vocabulary of {TOKENS};"):
        preflight.check("gpt", [*words.split(), "--load-hf", str(gpt2)], 1)


def test_a_token_that_only_the_tokenizer_has_is_trained_and_exported(
    trained: tuple[Path, Runs],
) -> None:
    folder, found = trained
    assert found["added"].column("lm loss")[0] > 80  # its logit is 0
    table = tiny.load(folder / "added-hf").get_input_embeddings().weight
    assert table.shape == (TOKENS + 1, 32) and table[TOKENS].any()
