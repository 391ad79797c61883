"""The commands of docs/fine-tune.md, from a tiny random model to an answer in transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.hf import tiny
from tests.test_docs_run import commands_of

PAGE = "docs/fine-tune.md"
CHATS = {"Who is Ada?": "A baker.", "How old is Bela?": "He is 1234567 days old."}


def run(command: list[str], folder: Path) -> str:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=480)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "Traceback" not in ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_goes_from_a_model_to_an_answer(tmp_path: Path) -> None:
    """The fine-tuned model answers as its chats do, which the random one does not."""
    folder = tmp_path / "llama"
    tiny.add_tokenizer(folder, [f"{ask} {said}" for ask, said in CHATS.items()], 290)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    tiny.make("llama", folder, vocab_size=290, max_position_embeddings=1024, **ends)
    lines = [
        {"messages": [{"role": "user", "content": u}, {"role": "assistant", "content": a}]}
        for u, a in CHATS.items()
    ]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines * 8))
    (train,) = (line for line in commands_of(PAGE) if line.startswith("megatron-dpp train"))
    words = train.replace("--lr 1e-5", "--lr 1e-2").split()[1:]
    run([sys.executable, "-m", "megatron.dpp", *words], tmp_path)
    shown = {line.split()[1]: line.split()[1:4] for line in commands_of(PAGE) if "tuned" in line}
    for ask, answer in CHATS.items():
        command = [sys.executable, "-m", "megatron.dpp", *shown["generate"], ask]
        assert run(command, tmp_path).strip() == answer
    command[4] = "llama-checkpoints"
    assert run(command, tmp_path).strip() == answer
    command = [sys.executable, "-m", "megatron.dpp", *shown["evaluate"], "chats.jsonl"]
    (perplexity,) = re.findall(r"perplexity ([\d.]+)", run(command, tmp_path))
    assert 1 <= float(perplexity) < 1.2
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / PAGE).read_text(), re.DOTALL)
    for ask, answer in CHATS.items():
        script = code.replace("Who is Ada?", ask)
        assert run([sys.executable, "-c", script], tmp_path).strip() == answer
    random = run([sys.executable, "-c", code.replace("llama-tuned", "llama")], tmp_path)
    assert random.strip() not in CHATS.values()
