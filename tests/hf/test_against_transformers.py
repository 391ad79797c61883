"""Fine-tuning has the losses of a plain loop with transformers and PyTorch's AdamW."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.tokenizers import HuggingFaceTokenizer
from tests.hf import tiny
from tests.loop.several import train_each

STEPS = 20
ANSWERS = ["A baker.", "Seven, I think.", "1234567", "In the old town, beside the river."]


def plain_loop(folder: Path, chats: list[dict[str, Any]]) -> list[float]:
    """The mean loss of an answer's token at each step; a step takes all chats, each with the same
    weight in the gradient."""
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)), {"default": tiny.CHAT_TEMPLATE})
    model = tiny.load(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, weight_decay=0)
    found: list[float] = []
    for _ in range(STEPS):
        total, count = 0.0, 0
        for chat in chats:
            (sample,), _ = encoder.encode(chat)
            ids, marks = torch.tensor(sample.ids), torch.tensor(sample.marks)
            logits = model(input_ids=ids[None, :-1]).logits[0]
            answers = marks[1:].bool()
            losses = cross_entropy(logits[answers], ids[1:][answers], reduction="none")
            (losses.mean() / len(chats)).backward()
            total, count = total + float(losses.detach().sum()), count + len(losses)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total / count)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_steps_have_the_losses_of_a_plain_loop(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    tiny.add_tokenizer(folder, ANSWERS, 290)
    tiny.make("llama", folder, vocab_size=290)
    roles = ("user", "assistant")
    chats = [
        {"messages": [{"role": r, "content": t} for r, t in zip(roles, ("Who?", a), strict=True)]}
        for a in ANSWERS
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    words = f"--input {source} --output-prefix {tmp_path}/chats --sft --workers 1 {tokenizer}"
    assert preprocess.main(words.split()) == 0
    run = (
        f"{' '.join(tiny.words(folder))} {tokenizer} --load-hf {folder} --seq-length 64 --sft "
        f"--hidden-dropout 0 --attention-dropout 0 --train-iters {STEPS} --lr 1e-3 "
        "--lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1 "
        "--pipeline-model-parallel-size 2 --use-dpp"
    )
    data = f"--data-path {tmp_path}/chats_chat_document --split 1,0,0"
    runs = {"dynamic": run, "static": run.replace(" --use-dpp", "")}
    found = train_each(tmp_path, 2, runs, data=data)
    ours = found["dynamic"].column("lm loss")
    assert ours == found["static"].column("lm loss")
    assert found["dynamic"].column("grad norm") == found["static"].column("grad norm")
    wanted = plain_loop(folder, chats)
    assert wanted[-1] < 0.8 * wanted[0]
    assert ours == pytest.approx(wanted, rel=1e-5)
