"""The model that ``generate`` and ``evaluate`` read: files, tokenizer, and what computes it."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.dpp.errors import ConfigError, DataError, one_line, require_value
from megatron.dpp.locks import scratch_directory
from megatron.dpp_train.checkpoint.files import Found, check_whole, find_named
from megatron.dpp_train.checkpoint.saved_args import saved_args
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.data.vocabulary import tokenizer_flags
from megatron.dpp_train.hf import HfConfig, read_config
from megatron.dpp_train.hf.fields import CONFIG, refuse_other_forms
from megatron.dpp_train.hf.files import origin_of_checkpoint, tokens_of
from megatron.dpp_train.hf.model import check_same, completed
from megatron.dpp_train.hf.run_files import end_ids
from megatron.dpp_train.text_files import nearest_path
from megatron.dpp_train.tokenizers import NullTokenizer, Tokenizer, tokenizer_for
from megatron.dpp_train.tokenizers.template_files import find_templates

if TYPE_CHECKING:
    from megatron.dpp_train.generate.engine import Engine

_ENGINES = ("auto", "megatron", "transformers")
_DTYPES = ("float32", "bfloat16", "float16")
_TEMPLATE = "--chat-template"
_VOCABULARY = ("tokenizer_model", "vocab_file")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, and the options that say how it is read and computed."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder to read")
    parser.add_argument("--step", type=int, metavar="N", help="iteration (default: the latest)")
    parser.add_argument("--tokenizer", metavar="T", help="DIR_OR_FILE (default: the model's)")
    parser.add_argument(
        _TEMPLATE, metavar="T", help="FILE, default or plain (default: the run's or tokenizer's)"
    )
    parser.add_argument(
        "--engine", choices=_ENGINES, default="auto", help="auto: megatron, if it has the family"
    )
    parser.add_argument(
        "--family-file", type=Path, metavar="FILE", help="Python file with a further family"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="default: bfloat16 on GPUs, else float32")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="sequences at once (default 8)"
    )


def check_model_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for values of these flags that mean nothing."""
    require_value(args, "batch_size", args.batch_size >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model.

    Args:
        found: its checkpoint; None for a Hugging Face folder.
        saved: arguments of the run that saved the checkpoint; None if it holds none.
        folder: the Hugging Face folder, or that which the checkpoint's model comes from.
        config: its ``config.json``; None without one, and for a family that only transformers
            knows.
        family_file: a Python file with a further family.
    """

    path: Path
    found: Found | None
    saved: Any
    folder: Path | None
    config: HfConfig | None
    family_file: Path | None = None

    @property
    def positions(self) -> int | None:
        """Tokens that a sequence may have, where that is known."""
        if self.found is None:
            known = self.config and self.config.flags["max-position-embeddings"]
        else:
            known = getattr(self.saved, "max_position_embeddings", None)
        return int(known) if known else None


def find_source(
    path: Path, step: int | None, engine: str, family_file: Path | None = None
) -> Source:
    """The model at ``path``: a Hugging Face folder, a directory of checkpoints, or one of them.

    Args:
        step: iteration of the checkpoint; the latest when None.
        family_file: a Python file with a further family.

    Raises:
        ConfigError: ``--step`` of a Hugging Face folder.
        DataError: there is no model, or it is not whole.
    """
    refuse_other_forms(path)
    if not path.is_dir():
        raise DataError(f"{path}: no such directory{nearest_path(path)}")
    if (path / CONFIG).is_file():
        if step is not None:
            raise ConfigError(f"--step: {path} is a Hugging Face model, not a checkpoint")
        config = _known_config(path, engine, family_file)
        return Source(
            path=path, found=None, saved=None, folder=path, config=config, family_file=family_file
        )
    found = find_named(path, step)
    if found is None:
        raise DataError(f"{path}: neither a Hugging Face model nor a checkpoint is there")
    if found.is_deepspeed:
        raise DataError(f"{path}: saved by DeepSpeed's engine, which alone can read it")
    check_whole(found, 1, 1)
    saved = saved_args(found)
    if saved is None:
        raise DataError(f"{found.path}: holds no arguments, so its model is not known")
    folder = origin_of_checkpoint(found, saved)
    config = _config_of(folder, saved, family_file) if folder else None
    folder = folder if config else None
    return Source(
        path=path, found=found, saved=saved, folder=folder, config=config, family_file=family_file
    )


def _config_of(folder: Path, saved: Any, family_file: Path | None) -> HfConfig | None:
    """The ``config.json`` of a checkpoint's model; None where it is broken or another model's."""
    try:
        config = read_config(folder, family_file)
        check_same(completed(saved), config, "", "", "")
    except DataError:
        return None
    return config


def _known_config(folder: Path, engine: str, family_file: Path | None) -> HfConfig | None:
    """The ``config.json`` of a folder; None for a family that only transformers may know."""
    try:
        return read_config(folder, family_file)
    except DataError:
        from megatron.dpp_train.generate.by_transformers import is_installed

        if engine == "transformers" or (engine == "auto" and is_installed()):
            return None
        raise


def tokenizer_of(source: Source, choice: str | None) -> tuple[Tokenizer, str | None]:
    """The model's tokenizer, and the file or directory beside which its chat template is.

    Args:
        choice: ``--tokenizer``; None takes that of the run, or of the Hugging Face folder.

    Raises:
        ConfigError: the choice means nothing.
        DataError: no tokenizer is known, or a file is missing.
    """
    if choice is None and getattr(source.saved, "tokenizer_type", None):
        return _of_run(source.saved)
    if choice is None and source.folder is None:
        raise DataError(f"{source.path}: its tokenizer is not known (--tokenizer DIR_OR_FILE)")
    if choice is not None and choice.partition(":")[0] == "train":
        raise ConfigError(
            f"--tokenizer {choice}: would train a new one; name the model's: DIR_OR_FILE, gpt2 or "
            "sample"
        )
    flags = tokenizer_flags("gpt", choice or str(source.folder), None)
    values = {name.strip("-").replace("-", "_"): value for name, value in flags.items()}
    named = argparse.Namespace(**{"tokenizer_type": "GPT2BPETokenizer", **values})
    place = next(values[name] for name in _VOCABULARY if name in values)
    return tokenizer_for(named), place


def _of_run(saved: Any) -> tuple[Tokenizer, str | None]:
    """The tokenizer with which a checkpoint was trained."""
    places = [getattr(saved, name, None) for name in _VOCABULARY]
    try:
        tokenizer = tokenizer_for(saved)
    except (ConfigError, DataError) as error:
        raise DataError(f"the run's tokenizer: {error}; name it (--tokenizer)") from error
    place = next(filter(None, places), None)
    if not tokenizer.keeps(getattr(saved, "tokenizer_tokens", None)):
        raise DataError(
            f"the run's tokenizer: {place} has other tokens now than when the run began; name a "
            "copy of what it was (--tokenizer)"
        )
    return tokenizer, place


def chat_encoder(
    source: Source, tokenizer: Tokenizer, place: str | None, choice: str | None = None
) -> ChatEncoder:
    """The encoder of chats, with the template of the run or the tokenizer.

    Args:
        place: from :func:`tokenizer_of`.
        choice: ``--chat-template``; None takes that of the run, or of the tokenizer.

    Raises:
        DataError: the template is missing or broken.
    """
    if isinstance(tokenizer, NullTokenizer):
        raise DataError(
            f"{source.path}: its tokenizer reads numbers, not chats; name another (--tokenizer "
            "DIR_OR_FILE)"
        )
    form = choice or getattr(source.saved, "sft_tokenizer_prompt_format", None) or "auto"
    return ChatEncoder(tokenizer, find_templates(form, place, flag=_TEMPLATE), flag=_TEMPLATE)


def ends_of(source: Source, tokenizer: Tokenizer, end: int | None = None) -> frozenset[int]:
    """Tokens that end a text: those of the model's folder, the tokenizer's, and ``end``, with which
    a chat template ends an answer.

    Raises:
        DataError: a file is broken.
    """
    found = end_ids(source.folder) if source.folder else []
    return frozenset((*found, tokenizer.eod, *([] if end is None else [end])))


def vocabulary_of(source: Source, tokenizer: Tokenizer) -> int:
    """Tokens that exist: those that the run counted, rows of ``config.json``, else the tokenizer's
    tokens. The model may have more rows, which are padding."""
    known = tokens_of(source.found, source.saved, source.family_file) if source.found else None
    if known is None and source.config:
        known = source.config.sizes.vocab
    return known or tokenizer.vocab_size


def check_ids(ids: Sequence[int], vocabulary: int, where: str) -> None:
    """Refuse tokens that the model does not have: a DataError names the place and one of them."""
    wrong = [token for token in ids if not 0 <= token < vocabulary]
    if wrong:
        raise DataError(
            f"{where}: token {wrong[0]} is outside the model's vocabulary of {vocabulary}; is "
            "--tokenizer another model's?"
        )


@contextlib.contextmanager
def opened(source: Source, args: argparse.Namespace, vocabulary: int) -> Iterator[Engine]:
    """The engine that computes the model, until the end of the block.

    Args:
        args: with the flags of :func:`add_model_flags`.
        vocabulary: tokens that exist.

    Raises:
        ConfigError: the device or its memory does not suffice, or a package is missing.
        DataError: the model is damaged.
    """
    import torch

    try:
        with _engine(source, args, vocabulary) as engine:
            yield engine
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{one_line(error, 200)}: use a smaller --batch-size, or a device with more memory"
        ) from error


@contextlib.contextmanager
def _engine(source: Source, args: argparse.Namespace, vocabulary: int) -> Iterator[Engine]:
    from megatron.dpp_train.generate import by_megatron, by_transformers

    if args.engine == "transformers" or (source.found is None and source.config is None):
        by_transformers.check_installed()
        with exported(source) as folder:
            yield by_transformers.TransformersEngine(folder, args.device, args.dtype)
        return
    with by_megatron.megatron_engine(
        source.found or source.path,
        vocabulary=vocabulary,
        device=args.device,
        dtype=args.dtype,
        family_file=source.family_file,
    ) as found:
        yield found


@contextlib.contextmanager
def exported(source: Source) -> Iterator[Path]:
    """The model as a Hugging Face folder; that of a checkpoint is temporary.

    Raises:
        DataError: the checkpoint's ``config.json`` is not known.
    """
    if source.found is None:
        yield source.path
        return
    if source.folder is None:
        raise DataError(
            f"{source.found.path}: no config.json of its model is known, which an export needs; "
            "make one with megatron-dpp convert --like DIR or --family NAME, and name that"
        )
    from megatron.dpp_train.hf.to_hf import to_hf

    place = Path(tempfile.gettempdir())
    with scratch_directory(place, "megatron-dpp-") as scratch:
        target = scratch / "model"
        to_hf(
            source.found.path,
            target,
            like=source.folder,
            family_file=source.family_file,
            run_files=False,
            progress=lambda _: None,
        )
        yield target
