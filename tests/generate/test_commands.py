"""``generate`` and ``evaluate`` as commands: sources, prompts, files, and bad input in one line."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.generate import engine as engines
from megatron.dpp_train.generate import evaluate_command as evaluate
from megatron.dpp_train.generate import generate_command as generate
from megatron.dpp_train.hf import convert_command as convert
from tests.generate.test_against_transformers import greedy, loss_of
from tests.hf import tiny
from tests.loop.several import train_each

TEXT = "Who is Ada? She bakes bread in the old town, 1234567 loaves a day."
CHAT = {
    "messages": [
        {"role": "user", "content": "Who is Ada?"},
        {"role": "assistant", "content": "A baker."},
    ]
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny.add_tokenizer(folder, [TEXT], 290)
    return tiny.make("llama", folder, vocab_size=290, bos_token_id=0, eos_token_id=1)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs ``generate`` or ``evaluate``; gives what it prints, or the line of its error."""

    def run(command: Any, *words: str | Path) -> str:
        capsys.readouterr()
        code = command.main([str(word) for word in words])
        out, err = capsys.readouterr()
        if code:
            assert code in (1, 2) and out == ""
            lines = [line for line in err.splitlines() if not line.startswith("engine: ")]
            assert len(lines) == 1
            return lines[0]
        assert err.startswith("engine: ")
        assert err.count("\n") == 1
        return out

    return run


def test_answers_to_texts_and_chats(model: Path, tmp_path: Path, ask: Callable[..., str]) -> None:
    few = ("--max-new-tokens", "6", "--device", "cpu")
    alone = ask(generate, model, "--prompt", "Who is", *few)
    several = ask(generate, model, "--prompt", "Who is", "--prompt", "Ada", *few)
    assert json.loads(several.splitlines()[0]) == {
        "prompt": "Who is",
        "completion": alone.removesuffix("\n"),
        "tokens": 6,
        "finish": "length",
    }
    (tmp_path / "p.txt").write_text("Who is\n\nAda\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "Who is"}\n{"text": "Ada"}\n')
    for name in ("p.txt", "p.jsonl"):
        assert ask(generate, model, "--prompts", tmp_path / name, *few) == several
    (tmp_path / "c.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 2)
    output = tmp_path / "out.jsonl"
    assert ask(generate, model, "--chat", tmp_path / "c.jsonl", "--output", output, *few) == ""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    answer = ask(generate, model, "--chat", "Who is Ada?", *few).removesuffix("\n")
    assert [each["messages"][1:] for each in lines] == [
        [{"role": "assistant", "content": answer}]
    ] * 2
    assert answer != alone


def test_losses_of_files(model: Path, tmp_path: Path, ask: Callable[..., str]) -> None:
    """Of a text, of lines, of chats, and of token files: those of transformers."""
    plain = tiny.load(model)
    tokenizer = generate.tokenizer_of(generate.find_source(model, None, "auto"), None)[0]
    ids = [0, *tokenizer.tokenize(TEXT)]
    losses = loss_of(plain, ids)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "lines.jsonl").write_text(f"{json.dumps({'text': TEXT})}\n" * 2)
    words = f"--input {tmp_path}/lines.jsonl --output-prefix {tmp_path}/t --workers 1 --append-eod "
    words += f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
    assert preprocess.main(words.split()) == 0
    ended = loss_of(plain, [*ids, 1])
    for data, tokens, wanted in (
        ("text.txt", len(losses), losses),
        ("lines.jsonl", 2 * len(losses), losses),
        ("t_text_document", 2 * len(ended), ended),
    ):
        found = json.loads(ask(evaluate, model, "--data", tmp_path / data, "--json"))
        assert found["tokens"] == tokens
        assert found["loss"] == pytest.approx(float(wanted.mean()), rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(wanted.mean()), rel=1e-4)
        bits = float(wanted.sum()) / math.log(2) / len(TEXT)
        assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    one = ask(evaluate, model, "--data", tmp_path / "lines.jsonl", "--limit", "1", "--json")
    assert json.loads(one)["tokens"] == len(losses)
    assert "in windows of 64, 32 apart" in ask(evaluate, model, "--data", tmp_path / "text.txt")


def test_losses_of_chats_are_those_of_answers(
    model: Path, tmp_path: Path, ask: Callable[..., str]
) -> None:
    source = generate.find_source(model, None, "auto")
    tokenizer, place = generate.tokenizer_of(source, None)
    (sample,), _ = generate.chat_encoder(source, tokenizer, place).encode(CHAT)
    ids, marks = sample.ids, sample.marks
    losses = loss_of(tiny.load(model), ids)[torch.tensor(marks[1:]).bool()]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 3)
    words = f"--input {tmp_path}/chats.jsonl --output-prefix {tmp_path}/c --workers 1 --sft "
    words += f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
    assert preprocess.main(words.split()) == 0
    for data in ("chats.jsonl", "c_chat_document"):
        found = json.loads(ask(evaluate, model, "--data", tmp_path / data, "--json"))
        assert found["tokens"] == 3 * len(losses)
        assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
        said = len("A baker.")
        assert found["bits_per_byte"] == pytest.approx(
            float(losses.sum()) / math.log(2) / said, rel=1e-5
        )


def test_a_converted_checkpoint_is_its_folder(
    model: Path, tmp_path: Path, ask: Callable[..., str]
) -> None:
    ours = tmp_path / "ours"
    assert convert.main([str(model), str(ours)]) == 0
    words = ("--prompt", "Who is", "--max-new-tokens", "12", "--temperature", "0.7")
    wanted = ask(generate, model, *words)
    for path in (ours, ours / "release"):
        assert ask(generate, path, *words) == wanted
    assert ask(generate, ours, *words, "--engine", "transformers") == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-dpp",
        "--tensor-model-parallel-size 2",
    ],
)
def test_a_checkpoint_of_any_layout_answers_as_its_export(
    layout: str, tmp_path: Path, ask: Callable[..., str]
) -> None:
    source = tiny.make("llama", tmp_path / "source", vocab_size=101)
    run = (
        f"{' '.join(tiny.words(source))} --padded-vocab-size 102 --load-hf {source} {layout} "
        "--lr-decay-style constant --train-iters 2 --save DIR/ours --save-interval 2"
    )
    train_each(tmp_path, 2, {"run": run})
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "export")]) == 0
    plain = tiny.load(tmp_path / "export")
    prompts = [[5, 7, 9], [11], [3, 4, 5, 6, 7, 8]]
    file = tmp_path / "prompts.txt"
    file.write_text("".join(" ".join(map(str, prompt)) + "\n" for prompt in prompts))
    words = ("--prompts", file, "--max-new-tokens", "32")
    found = ask(generate, tmp_path / "ours", *words)
    answers = [json.loads(line)["completion"].split() for line in found.splitlines()]
    ends = (2, 100)  # of config.json, and of the tokenizer
    wanted = [
        [str(token) for token in itertools.takewhile(lambda t: t not in ends, greedy(plain, each))]
        for each in prompts
    ]
    assert answers == wanted
    assert found == ask(generate, tmp_path / "ours", *words, "--engine", "transformers")
    assert found == ask(generate, tmp_path / "ours" / "iter_0000002", *words)
    assert found != ask(generate, source, *words, "--tokenizer", "sample")


@pytest.mark.slow
def test_a_checkpoint_in_the_other_format_answers_alike(
    tmp_path: Path, ask: Callable[..., str]
) -> None:
    source = tiny.make("mixtral", tmp_path / "source", vocab_size=101)
    run = (
        f"{' '.join(tiny.words(source))} --load-hf {source} --lr-decay-style constant "
        "--train-iters 2 --save-interval 2 --ckpt-format {0} --save DIR/{0}"
    )
    formats = ("torch_dist", "torch")
    train_each(tmp_path, 1, {name: run.format(name) for name in formats})
    words = ("--prompt", "5 7 9", "--prompt", "3", "--max-new-tokens", "16")
    found = [ask(generate, tmp_path / name, *words) for name in formats]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("{none} --prompt x", "none: no such directory"),
        ("{tmp} --prompt x", "neither a Hugging Face model nor a checkpoint is there"),
        ("{model} --prompt x --step 3", "--step: "),
        ("{model} --prompts {none}", "--prompts {none}: No such file"),
        (
            "{model} --prompts /dev/null",
            "--prompts /dev/null: is a device, expected a regular file",
        ),
        ("{model} --chat {none}.jsonl", "--chat {none}.jsonl: no such file"),
        ("{model} --prompt x --tokenizer {none}", "--tokenizer {none}: no such file"),
        ("{model} --prompt x --batch-size 0", "--batch-size 0: must be at least 1"),
        ("{model} --prompt x --max-new-tokens 0", "--max-new-tokens 0: must be at least 1"),
        ("{model} --prompt x --top-k 5", "need a --temperature above 0"),
        ("{model} --prompt x --output {model}/config.json", "exists; name another file"),
        ("{model} --prompt x --output {none}/out", "its directory does not exist"),
        ("{model} --prompt x --chat-template plain", "--chat-template plain: needs --chat"),
    ],
)
def test_bad_words_of_generate(
    words: str, said: str, model: Path, tmp_path: Path, ask: Callable[..., str]
) -> None:
    names = {"none": tmp_path / "none", "tmp": tmp_path, "model": model}
    assert said.format(**names) in ask(generate, *words.format(**names).split())


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("  ", "--prompt: empty"),
        ("x " * 70, "tokens, and the model has 64 positions, of which the answer needs one"),
    ],
)
def test_prompts_that_cannot_be_answered(
    prompt: str, said: str, model: Path, ask: Callable[..., str]
) -> None:
    assert said in ask(generate, model, "--prompt", prompt)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": []}', "chats.jsonl, line 2: "),
        ('{"messages": [{"role": "assistant", "content": "A"}]}', "no message to answer"),
        ('{"messages": [{"role": "user", "content": "<|end|>"}]}', "the special token <|end|>"),
        ("{", "line 2: not JSON"),
    ],
)
def test_chats_that_cannot_be_asked(
    line: str, said: str, model: Path, tmp_path: Path, ask: Callable[..., str]
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{json.dumps(CHAT)}\n{line}\n")
    assert said in ask(generate, model, "--chat", file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "nothing to evaluate: give --data FILE or --tasks NAMES"),
        ("--tasks piqa", "pip install lm_eval"),
        ("--data {tmp}/none", "neither a file nor a prefix of token files"),
        ("--data {tmp}/bad.jsonl", "bad.jsonl, line 2: neither"),
        ("--data {tmp}/few.txt --window 65", "--window 65: must be at least 2 and at most 64"),
        ("--data {tmp}/few.txt --stride 0", "--stride 0: must be at least 1"),
        ("--data {tmp}/few.txt --batch-size 0", "--batch-size 0"),
        ("--data {tmp}/few.txt --limit 0", "--limit 0"),
        ("--data {tmp}/empty.txt", "no document has two tokens"),
    ],
)
def test_bad_words_of_evaluate(
    words: str,
    said: str,
    model: Path,
    tmp_path: Path,
    ask: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": 1}\n')
    (tmp_path / "few.txt").write_text("Ada")
    (tmp_path / "empty.txt").touch()
    assert said in ask(evaluate, model, *words.format(tmp=tmp_path).split())


def test_what_does_not_fit_is_refused_with_its_bytes(
    model: Path, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Few:
        available = 1 << 16

    monkeypatch.setattr(engines.psutil, "virtual_memory", Few)
    said = ask(generate, model, "--prompt", "Ada", "--device", "cpu")
    assert "parameters: " in said
    assert "cpu has 65,536 free (0.0 GiB)" in said
    Few.available = 1 << 18
    said = ask(generate, model, "--prompt", "Ada", "--device", "cpu", "--max-new-tokens", "9")
    assert not said.startswith("megatron-dpp")  # it fits


HARNESS = """
def simple_evaluate(**settings):
    import json, pathlib
    assert (pathlib.Path(settings["model_args"]["pretrained"]) / "config.json").is_file()
    if settings["tasks"] == ["none"]:
        raise KeyError("no task none")
    return {"results": {name: {"acc": 0.5} for name in settings["tasks"]}}
"""


def test_tasks_run_on_the_export(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "path" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(HARNESS)
    (package / "utils.py").write_text("def make_table(results): return str(results)\n")
    monkeypatch.syspath_prepend(str(package.parent))
    assert convert.main([str(model), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    words = [str(tmp_path / "ours"), "--device", "cpu", "--tasks"]
    assert evaluate.main([*words, "piqa,boolq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "tasks": {"piqa": {"acc": 0.5}, "boolq": {"acc": 0.5}}
    }
    assert evaluate.main([*words, "none"]) == 1
    assert "--tasks none: 'no task none'" in capsys.readouterr().err
