"""A family of a user's own, from the file and by the commands of its page."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp_train.families.page import PAGE
from megatron.dpp_train.generate.by_megatron import megatron_engine
from megatron.dpp_train.hf import read_config
from megatron.dpp_train.hf.convert_command import main as convert
from tests.conftest import REPOSITORY
from tests.hf import tiny

TEXT = PAGE.read_text(encoding="utf-8")
FILE, OPENED = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(CHAT,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
(COMMANDS,) = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
WORDS = ["Who is Ada?", "A baker.", "conversations and answers"]


def make(folder: Path, **more: Any) -> Path:
    """A small model of the page's family, with a tokenizer."""
    import transformers

    transformers.logging.disable_progress_bar()
    sizes = {**tiny.SIZES, "vocab_size": 290, "hidden_act": "relu2", "pad_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    torch.manual_seed(1)
    config = transformers.ArceeConfig(**sizes | {"rope_parameters": rope, "eos_token_id": 1} | more)
    transformers.ArceeForCausalLM(config).save_pretrained(folder)
    tiny.add_tokenizer(folder, WORDS, 290)
    return folder


def test_the_file_of_the_page_describes_its_family(tmp_path: Path) -> None:
    (tmp_path / "arcee.py").write_text(FILE)
    folder, flag = make(tmp_path / "afm"), ["--family-file", str(tmp_path / "arcee.py")]
    tokens = torch.arange(40)
    with torch.no_grad():
        logits = tiny.load(folder)(tokens[None]).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    file = Path(flag[1])
    with megatron_engine(folder, vocabulary=290, device="cpu", family_file=file) as engine:
        (found,) = engine.losses([tokens.tolist()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert convert([str(folder), str(tmp_path / "ours"), *flag]) == 0
    assert convert([str(tmp_path / "ours"), str(tmp_path / "back"), *flag]) == 0
    before, after = (tiny.load(each).state_dict() for each in (folder, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)


LAYER = """
from dataclasses import replace
from megatron.dpp_train.families.known import llama

def halved(spec, config, args):
    config.softmax_scale = 0.1
    return spec

FAMILY = replace(llama.FAMILY, name="halved", layer=halved)
"""


def test_a_family_changes_the_layers_that_are_built(tmp_path: Path) -> None:
    (tmp_path / "halved.py").write_text(LAYER)
    folder = tiny.make("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    losses = []
    for name in ("llama", "halved"):
        (folder / "config.json").write_text(json.dumps(config | {"model_type": name}))
        file = tmp_path / "halved.py"
        assert ("--family" in read_config(folder, file).words()) == (name == "halved")
        with megatron_engine(folder, vocabulary=96, device="cpu", family_file=file) as engine:
            losses.append(engine.losses([list(range(40))])[0])
    assert not torch.allclose(*losses)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_lead_from_a_file_of_chats_to_answers(tmp_path: Path) -> None:
    (tmp_path / "arcee.py").write_text(FILE)
    make(tmp_path / "afm")
    (tmp_path / "sharegpt.json").write_text(json.dumps(json.loads(CHAT) * 8))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    said = {}
    small = COMMANDS.replace("--seq-length 1024", "--seq-length 64").replace("1e-5", "1e-2")
    for line in small.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-m", "megatron.dpp", *words[1:]],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        said[words[1]] = done.stdout
    assert small.count("--seq-length 64") == small.count("1e-2") == 1
    assert set(said) == {"train", "generate", "evaluate", "convert"}
    assert "A baker." in said["generate"]
    opened = subprocess.run([sys.executable, "-c", OPENED], cwd=tmp_path, timeout=200)
    assert opened.returncode == 0
    tuned, again = (tiny.load(tmp_path / name).state_dict() for name in ("afm-tuned", "afm-again"))
    before = tiny.load(tmp_path / "afm").state_dict()
    for name, tensor in tuned.items():
        assert torch.equal(tensor, again[name]), name
        assert not torch.equal(tensor, before[name]), name
