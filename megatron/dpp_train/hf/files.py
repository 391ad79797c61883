"""Checks ``--load-hf`` and ``--save-hf`` before the start: flags, tokenizer and target."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp.naming import flag_name
from megatron.dpp_train.checkpoint import checksums
from megatron.dpp_train.checkpoint.files import Found, find_start
from megatron.dpp_train.checkpoint.saved_args import saved_args
from megatron.dpp_train.hf import read_config
from megatron.dpp_train.hf.fields import CONFIG, ORIGIN
from megatron.dpp_train.hf.model import check_same
from megatron.dpp_train.hf.weights import find_weights
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.text_files import read_json
from megatron.dpp_train.tokenizers import PIECE_TYPES, PIECES

_VOCABULARIES = ("tokenizer.json", "vocab.json")


def check_hf(args: Settings) -> None:
    """Refuse a ``--load-hf`` of another model and a ``--save-hf`` that would fail at the end
    (DataError)."""
    if args.load_hf:
        _check_load(args, Path(args.load_hf))
    if args.save_hf:
        _check_save(args, Path(args.save_hf))


def _check_load(args: Settings, folder: Path) -> None:
    given = f"--load-hf {folder}"
    _refuse_engines(args, given, "run megatron-dpp convert, then give --pretrained-checkpoint")
    if args.pretrained_checkpoint:
        raise DataError(
            f"{given} and --pretrained-checkpoint {args.pretrained_checkpoint} exclude each other: "
            "a run starts from one of them"
        )
    _check_model(args, folder, given)
    find_weights(folder)
    _check_tokenizer(args, folder)


def _check_save(args: Settings, target: Path) -> None:
    given = f"--save-hf {target}"
    if not args.save:
        raise DataError(f"{given}: needs --save, whose last checkpoint it converts")
    if target.exists():
        raise DataError(f"{given}: exists; name another target")
    _refuse_engines(args, given, "train without it, or convert a checkpoint of another run")
    if args.ckpt_format != "torch_dist":
        raise DataError(f"{given} needs --ckpt-format torch_dist, not {args.ckpt_format}")
    origin = origin_of(args)
    if origin is None:
        raise DataError(
            f"{given}: the config.json of the model is not known; start from --load-hf or from a "
            "converted checkpoint, or run megatron-dpp convert with --family after training"
        )
    if not args.load_hf:
        _check_model(args, origin, given)


def loaded_tokens(args: Settings) -> int | None:
    """Tokens of the Hugging Face model that a run loads, at its start or earlier; None for a model
    that was trained from random parameters. The run's model may have more rows, which are padding.

    Raises:
        DataError: the model or checkpoint to start from is broken.
    """
    found = find_start(args)
    if found is None:
        return (
            read_config(Path(args.load_hf), args.family_file).sizes.vocab if args.load_hf else None
        )
    return tokens_of(found, saved_args(found) or args, args.family_file)


def tokens_of(found: Found, saved: Any, family_file: str | Path | None = None) -> int | None:
    """Tokens of a checkpoint's model; None as :func:`loaded_tokens`.

    Args:
        saved: arguments of the run that saved it; of the run that loads it, if it holds none.
    """
    known = getattr(saved, "loss_vocab_size", None)
    if known is not None:
        return int(known)
    folder = origin_of_checkpoint(found, saved)
    try:
        return read_config(folder, family_file).sizes.vocab if folder else None
    except DataError:  # another model's since
        return None


def _refuse_engines(args: Settings, given: str, instead: str) -> None:
    for name in ("use_torch_fsdp2", "deepspeed_zero_stage"):
        if getattr(args, name):
            raise DataError(f"{given} does not go with {flag_name(name)}: {instead}")


def origin_of_checkpoint(found: Found, saved: Any) -> Path | None:
    """The folder with the ``config.json`` of a checkpoint's model.

    Args:
        saved: arguments of the run that saved it; None where they are not known.

    Raises:
        DataError: a file of a conversion was changed since, or is missing.
    """
    names = ("load_hf", "pretrained_checkpoint", "load", "model_origin")
    return _find_origin(found.path.parent, [getattr(saved, name, None) for name in names])


def origin_of(args: Settings) -> Path | None:
    """The folder with the ``config.json`` of the model that a run starts from, or that an earlier
    run started from whose checkpoint it goes on from."""
    if args.load_hf:
        return Path(args.load_hf)
    places = (args.pretrained_checkpoint, args.load, args.model_origin)
    folder = _find_origin(Path(args.save or ""), places)
    found = None if folder else find_start(args)
    return origin_of_checkpoint(found, saved_args(found)) if found else folder


def _find_origin(save: Path, started: Iterable[str | None]) -> Path | None:
    """The folder beside the checkpoints in ``save``, or which a run ``started`` from, and which is
    that of its conversion."""
    places = [save / ORIGIN]
    for each in filter(None, started):
        places += [Path(each), Path(each) / ORIGIN]
    folder = next((place for place in places if (place / CONFIG).is_file()), None)
    if folder is not None:
        sums = checksums.read(folder) or {}
        advice = f"convert again; if you changed it yourself, remove {folder / checksums.NAME}"
        checksums.check(folder, sums, list(sums), advice)
    return folder


def _check_model(args: Settings, folder: Path, given: str) -> None:
    """Compare the flags that shape a model or change its numbers with a ``config.json``."""
    advice = f"megatron-dpp train --model {folder} gives its flags"
    check_same(args, read_config(folder, args.family_file), given, str(folder / CONFIG), advice)


def _check_tokenizer(args: Settings, folder: Path) -> None:
    """Refuse a vocabulary with other ids than the folder's, as far as they can be read."""
    given = getattr(args, "tokenizer_model", None) or args.vocab_file
    theirs = next((folder / name for name in _VOCABULARIES if (folder / name).is_file()), None)
    if theirs is None and args.vocab_file and (folder / PIECES).is_file():
        raise DataError(
            f"--load-hf {folder}: its tokenizer is {PIECES}, --vocab-file {args.vocab_file} has "
            f"other ids; train with --tokenizer {folder}"
        )
    if given is not None and args.tokenizer_type in PIECE_TYPES:
        _check_pieces(Path(given), folder)
        return
    if given is None or theirs is None:
        return
    ours = Path(given) / _VOCABULARIES[0] if Path(given).is_dir() else Path(given)
    if not ours.is_file():  # made later, or refused where it is read
        return
    here, there = _ids(ours), _ids(theirs)
    token = next((each for each in here if there and there.get(each) != here[each]), None)
    if token is not None:
        raise DataError(
            f"--load-hf {folder}: its tokenizer is not {ours}: {token!r} is {here[token]} there, "
            f"{there.get(token)} in {theirs.name}; train with --tokenizer {folder}"
        )


def _check_pieces(ours: Path, folder: Path) -> None:
    """Refuse a ``tokenizer.model`` with other bytes than the folder's, where it has one."""
    ours, theirs = ours / PIECES if ours.is_dir() else ours, folder / PIECES
    if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
        raise DataError(
            f"--load-hf {folder}: its {PIECES} is another than {ours}; train with --tokenizer "
            f"{folder}"
        )


def _ids(file: Path) -> dict[str, int]:
    """Token -> id; nothing where the file is of another kind."""
    try:
        content = read_json(file)
        vocab = content["model"]["vocab"] if "model" in content else content
        if isinstance(vocab, list):  # with scores, in the order of ids
            vocab = {token: index for index, (token, _) in enumerate(vocab)}
        added = content["added_tokens"] if "model" in content else []
        return dict(vocab) | {each["content"]: each["id"] for each in added}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
