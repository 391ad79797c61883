"""Fine-tuning has the losses of a plain loop with transformers and PyTorch's AdamW."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.tokenizers import HuggingFaceTokenizer
from tests.hf import tiny
from tests.loop.several import train_each

ANSWERS = ["A baker.", "Seven, I think.", "1234567", "In the old town, beside the river."]
CHATS = [
    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": answer}]}
    for answer in ANSWERS
]


def plain_loop(folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """The mean loss of an answer's token and the norm of the gradient at each step; a step takes
    all chats, each with the same weight in the gradient."""
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)), {"default": tiny.CHAT_TEMPLATE})
    model = tiny.load(folder)  # as for evaluation: without dropout
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, weight_decay=0)
    found, norms = [], []
    for _ in range(steps):
        total, count = 0.0, 0
        for chat in CHATS:
            (sample,), _ = encoder.encode(chat)
            ids, marks = torch.tensor(sample.ids), torch.tensor(sample.marks)
            logits = model(input_ids=ids[None, :-1]).logits[0]
            answers = marks[1:].bool()
            losses = cross_entropy(logits[answers], ids[1:][answers], reduction="none")
            (losses.mean() / len(CHATS)).backward()
            total, count = total + float(losses.detach().sum()), count + len(losses)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        found.append(total / count)
    return found, norms


def made(family: str, folder: Path) -> Path:
    """A model with a tokenizer."""
    tiny.add_tokenizer(folder, ANSWERS, 290)
    return tiny.make(family, folder, vocab_size=290)


def prepared(folder: Path, tokenizer: Path) -> str:
    """The flags of the chats, encoded by a model's tokenizer."""
    source = folder / "chats.jsonl"
    source.write_text("".join(f"{json.dumps(chat)}\n" for chat in CHATS))
    words = f"--input {source} --output-prefix {folder}/chats --sft --workers 1 "
    words += f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    assert preprocess.main(words.split()) == 0
    return f"--data-path {folder}/chats_chat_document --split 1,0,0"


def flags_of(folder: Path, steps: int) -> str:
    """The flags of fine-tuning without a layout."""
    words = " ".join(word.replace(" ", "") for word in tiny.words(folder))
    return (
        f"{words} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} "
        f"--load-hf {folder} --seq-length 64 --sft --hidden-dropout 0 --attention-dropout 0 "
        f"--train-iters {steps} --lr 1e-3 --lr-decay-style constant --weight-decay 0 "
        "--adam-beta2 0.95 --clip-grad 1"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_steps_have_the_losses_of_a_plain_loop(tmp_path: Path) -> None:
    folder = made("llama", tmp_path / "llama")
    run = f"{flags_of(folder, 20)} --pipeline-model-parallel-size 2"
    runs = {"dynamic": f"{run} --use-dpp", "static": run}
    found = train_each(tmp_path, 2, runs, data=prepared(tmp_path, folder))
    ours = found["dynamic"].column("lm loss")
    assert ours == found["static"].column("lm loss")
    assert found["dynamic"].column("grad norm") == found["static"].column("grad norm")
    wanted, _ = plain_loop(folder, 20)
    assert wanted[-1] < 0.8 * wanted[0]
    assert ours == pytest.approx(wanted, rel=1e-5)


LAYOUTS = {
    "dynamic": "--pipeline-model-parallel-size 2 --use-dpp",
    "static": "--pipeline-model-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_a_few_steps_of_each_family_have_the_losses_of_a_plain_loop(
    part: int, tmp_path: Path
) -> None:
    """Several families in one start of processes, in three layouts each."""
    families = [name for name in tiny.MODELS if name != "llama"][part::4]
    folders = {name: made(name, tmp_path / name) for name in families}
    runs = {}
    for name, folder in folders.items():
        more = "" if name not in tiny.SPARSE else " --moe-aux-loss-coeff 0"
        for layout, words in LAYOUTS.items():
            if name == "gpt_oss" and layout == "tensor":  # experts with biases are not cut
                words = f"{words} --expert-model-parallel-size 2"
            runs[f"{name}-{layout}"] = f"{flags_of(folder, 4)}{more} {words}"
    data = prepared(tmp_path, folders[families[0]])
    found = train_each(tmp_path, 2, runs, data=data, timeout=400)
    for name, folder in folders.items():
        losses, norms = plain_loop(folder, 4)
        columns = {
            layout: [found[f"{name}-{layout}"].column(each) for each in ("lm loss", "grad norm")]
            for layout in LAYOUTS
        }
        assert columns["dynamic"] == columns["static"], name
        for layout, (ours, our_norms) in columns.items():
            assert ours == pytest.approx(losses, rel=2e-5), (name, layout)
            assert our_norms == pytest.approx(norms, rel=1e-5), (name, layout)
