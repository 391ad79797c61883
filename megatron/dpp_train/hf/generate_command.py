"""``megatron-dpp generate``: a model's answers to prompts, by transformers."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import DataError, one_line, require
from megatron.dpp_train.data.tokenizer import of_transformers
from megatron.dpp_train.hf.fields import CONFIG
from megatron.dpp_train.hf.folder import TOKENIZER
from megatron.dpp_train.hf.prompts import Chat, encode
from megatron.dpp_train.text_files import parse_json, read_text

_JSON = (".jsonl", ".json")


def _parser(prog: str) -> argparse.ArgumentParser:
    text = (
        "Print a model's answers to prompts: one as it is, several as JSON lines. MODEL is a "
        "Hugging Face folder, or a directory of checkpoints, which is converted to one first."
    )
    parser = new_parser(prog, text, "MODEL --prompt TEXT | --prompts FILE | --chat TEXT [options]")
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder or checkpoints")
    one_of = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    one_of.add_argument("--prompt", action="append", metavar="TEXT", help="a text to continue")
    one_of.add_argument("--prompts", type=Path, metavar="FILE", help="one a line, or JSON lines")
    one_of.add_argument("--chat", metavar="TEXT", help="a question, or FILE.jsonl of chats")
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from N tokens")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from this part")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    group = parser.add_argument_group("model")
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: the model's")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="default: the model's")
    group.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    group.add_argument("--like", type=Path, metavar="DIR", help="folder of a checkpoint's model")
    group.add_argument("--family", metavar="NAME", help="kind of a checkpoint's model")
    group.add_argument("--step", type=int, metavar="N", help="iteration (default: the latest)")
    return parser


def _run(args: argparse.Namespace) -> int:
    for name, good, rule in (
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= args.temperature < math.inf, "from 0 on"),
        ("top_k", args.top_k >= 0, "from 0 on"),
        ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
    ):
        flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
        require(good, f"{flag}: must be {rule}")
    prompts = _prompts(args)
    template = read_text(args.chat_template, "--chat-template") if args.chat_template else None
    with _folder(args) as folder:
        place = args.tokenizer or folder
        ids, end = encode(place, prompts, template)
        answers = _Answers(folder, place, args, end)
        for number, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True), 1):
            text, count, finish = answers.to(tokens, f"prompt {number}")
            line = {**_answered(prompt, text), "tokens": count, "finish": finish}
            said = text if len(prompts) == 1 else json.dumps(line, ensure_ascii=False)
            print(said, flush=True)
    return 0


# --- prompts ---


def _prompts(args: argparse.Namespace) -> list[str | Chat]:
    if args.prompt is not None:
        found: list[str | Chat] = list(args.prompt)
    elif args.prompts is not None:
        found = list(_of_file(args.prompts, "--prompts"))
    elif args.chat.endswith(_JSON):
        found = list(_of_file(Path(args.chat), "--chat"))
    else:
        found = [[{"role": "user", "content": args.chat}]] if args.chat.strip() else []
    if not found or any(isinstance(each, str) and not each.strip() for each in found):
        raise DataError("a prompt is empty: the model needs at least one token")
    return found


def _of_file(path: Path, flag: str) -> Iterator[str | Chat]:
    """The prompt of each line that is not empty, of JSON or as it is."""
    for number, line in enumerate(read_text(path, flag).split("\n"), 1):
        if line.strip():
            where = f"{flag} {path}, line {number}"
            is_json = path.name.endswith(_JSON)
            yield _prompt(parse_json(line, where), where) if is_json else line


def _prompt(value: Any, where: str) -> str | Chat:
    """The text or the messages of a line, without the answers at the end, so that files of training
    can be asked again."""
    names = ("messages", "prompt", "text")
    found = value if isinstance(value, dict) else {}
    prompt = next((found[name] for name in names if name in found), None)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(
        isinstance(each, dict) and "role" in each for each in prompt
    ):
        raise DataError(f"{where}: expected an object with a text or messages: {', '.join(names)}")
    while prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise DataError(f"{where}: no message to answer")
    return prompt


def _answered(prompt: str | Chat, text: str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": text}
    return {"messages": [*prompt, {"role": "assistant", "content": text}]}


# --- the model ---


@contextlib.contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    """The Hugging Face folder of the model; of a checkpoint, a temporary one."""
    if (args.model / CONFIG).is_file():
        yield args.model
        return
    from megatron.dpp_train.hf.convert import to_hf

    with tempfile.TemporaryDirectory(prefix="megatron-dpp-generate-") as scratch:
        target = Path(scratch) / "model"
        names = ("like", "family", "step", "dtype")
        to_hf(args.model, target, **{name: getattr(args, name) for name in names})
        if args.tokenizer is None and not any((target / name).is_file() for name in TOKENIZER):
            raise DataError(
                f"{args.model}: its tokenizer is not known; name its folder (--tokenizer)"
            )
        yield target


class _Answers:
    """transformers' model of a folder, which answers one prompt at a time, so that answers do not
    depend on their neighbours."""

    def __init__(
        self, folder: Path, place: Path, args: argparse.Namespace, end: int | None
    ) -> None:
        import torch

        transformers: Any = importlib.import_module("transformers")
        self._torch, self._args = torch, args
        self._tokenizer = of_transformers(place)
        on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
        self._device = torch.device("cuda" if on_gpu else "cpu")
        kind = args.dtype or ("bfloat16" if on_gpu else "float32")
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, kind), local_files_only=True, trust_remote_code=False
            )
            self._model.to(self._device).eval()
        except Exception as error:  # a broken folder raises anything
            raise DataError(
                f"{folder}: transformers cannot load it ({one_line(error, 200)})"
            ) from error
        settings = self._model.generation_config
        known = settings.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        more = [each for each in (end, self._tokenizer.eos_token_id) if each is not None]
        self._ends = sorted({*known, *more})
        self._positions = self._model.config.get_text_config().max_position_embeddings
        print(f"transformers {transformers.__version__}, {kind}, {self._device}", file=sys.stderr)

    def to(self, prompt: list[int], where: str) -> tuple[str, int, str]:
        """Text, number of tokens, and ``stop`` or ``length``."""
        torch, args = self._torch, self._args
        room = self._positions - len(prompt)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if not prompt or room < 1:
            raise DataError(
                f"{where}: {len(prompt)} tokens; the model has {self._positions} positions, of "
                "which prompt and answer need one each"
            )
        if max(prompt) >= vocabulary:
            raise DataError(f"{where}: token {max(prompt)}, and the model has {vocabulary}")
        torch.manual_seed(args.seed)
        draws = args.temperature > 0
        settings = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
        with torch.inference_mode():
            whole = self._model.generate(
                torch.tensor([prompt], device=self._device),
                max_new_tokens=min(args.max_new_tokens, room),
                do_sample=draws,
                eos_token_id=self._ends or None,
                pad_token_id=self._ends[0] if self._ends else 0,
                **(settings if draws else {"temperature": None, "top_k": None, "top_p": None}),
            )
        answer = whole[0, len(prompt) :].tolist()
        finish = "stop" if answer and answer[-1] in self._ends else "length"
        answer = answer[:-1] if finish == "stop" else answer
        return self._text(prompt, answer), len(answer), finish

    def _text(self, prompt: list[int], answer: list[int]) -> str:
        """The text of an answer; some tokenizers drop the blank at the beginning of a text."""
        decode = self._tokenizer.decode
        before, whole = (
            decode(each, skip_special_tokens=True) for each in (prompt, prompt + answer)
        )
        inside = whole.startswith(before)
        text: str = whole[len(before) :] if inside else decode(answer, skip_special_tokens=True)
        return text


main = command("megatron-dpp generate", _parser, _run)
