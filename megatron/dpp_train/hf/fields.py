"""Fields of Hugging Face's ``config.json`` as flags of training, by the tables of families.

A field that changes what a model computes is mapped or refused. One that says how to train or to
generate may be left, and a note names it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp_train.hf.families import Config, Family, Sizes, find_families
from megatron.dpp_train.hf.families.rotary import add_rotary
from megatron.dpp_train.hf.forms import FLAG, NAMES, Forms
from megatron.dpp_train.text_files import read_json

CONFIG = "config.json"
_MOST = {"num_hidden_layers": 10_000, "n_layer": 10_000}
_MOST_OF_ALL, _MOST_EXPERTS = 1 << 31, 1 << 17
"""Sizes, and experts of all layers, from which on a ``config.json`` is taken for a damaged one."""
_OTHER_NAMES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Names of a field in files of other versions of transformers -> its name in a family's table."""

_SILENT = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "max_window_layers"),
    *("output_router_logits", "reorder_and_upcast_attn", "task_specific_params", "n_ctx"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "auto_map", "_attn_implementation", "unsloth_fixed"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    *("sliding_window", "layer_types"),
    *("tie_word_embeddings", "norm_topk_prob"),
}
"""Fields that are read apart, or say nothing about training."""


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """A ``config.json``.

    Args:
        content: the file's, as it is.
        flags: Megatron's flags, without dashes in front, and forms of :class:`Forms`; True for a
            switch.
        notes: fields that no flag stands for.
    """

    family: Family
    content: Config
    flags: dict[str, Any]
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The sizes among the flags."""
        return Sizes(self.flags)

    @property
    def forms(self) -> Forms:
        """The forms among the flags."""
        found = {name: value for name, value in self.flags.items() if name in NAMES}
        return Forms(**{name.replace("-", "_"): value for name, value in found.items()})

    def words(self, tensor_parallel: int = 1) -> list[str]:
        """The flags as words of a command line.

        Args:
            tensor_parallel: ranks that must divide the rows of the vocabulary, which is padded.
        """
        tokens, forms = self.sizes.vocab, self.forms
        flags = {name: value for name, value in self.flags.items() if name not in NAMES}
        flags["padded-vocab-size"] = -(-tokens // tensor_parallel) * tensor_parallel
        if flags["padded-vocab-size"] > tokens:
            forms = replace(forms, tokens=tokens)
        if str(forms):
            flags[FLAG.removeprefix("--")] = str(forms)
        words: list[str] = []
        for name, value in flags.items():
            words += [f"--{name}", *([] if value is True else [str(value)])]
        return words


def read_config(folder: str | Path) -> HfConfig:
    """The ``config.json`` in a folder of a Hugging Face model.

    Raises:
        DataError: there is none, or a model of this kind cannot be trained here.
    """
    path = Path(folder) / CONFIG
    content = read_json(inside(Path(folder), CONFIG))
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object")
    return parse_config(content, str(path))


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a model's folder whose text is given away with a converted model.

    Raises:
        DataError: a link leads out of the folder, and of the hub's cache around it.
    """
    root, path = folder.resolve(), folder / name
    real = path.resolve()
    roots = [root]
    if root.parent.name == "snapshots":  # models--NAME/snapshots/REVISION beside models--NAME/blobs
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(each) for each in roots):
        raise DataError(
            f"{path}: a link to {real}, outside of the model's folder: copy the file there"
        )
    return path


def parse_config(content: Config, where: str) -> HfConfig:
    """Flags and sizes of a ``config.json``.

    Args:
        where: its name, for errors.

    Raises:
        DataError: a field is missing, or has a value that cannot be trained here.
    """
    with located(where):
        families, name = find_families(), content.get("model_type")
        if str(name) not in families:
            known = ", ".join(sorted(families))
            raise DataError(f"model_type {shown(name)} is not supported; expected one of {known}")
        family = families[str(name)]
        flags, notes = _read(family, _renamed(family, family.prepare(content)))
        found = HfConfig(family=family, content=content, flags=flags,
                         notes=tuple(f"{where}: {text}" for text in notes))  # fmt: skip
        layers, experts = found.sizes.layers, found.sizes.experts
        if layers * experts > _MOST_EXPERTS:
            raise DataError(f"{layers} layers of {experts} experts are too many")
        return found


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Let errors of the block begin with ``where``; what a family's own function raises at values
    that it does not know is a DataError, too."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"{where}: its fields cannot be read ({why})") from error


def _read(family: Family, content: Config) -> tuple[dict[str, Any], list[str]]:
    """Flags of a ``config.json``, and notes about it."""
    if content.get("quantization_config"):
        raise DataError("a quantized model; convert needs one in 16 or 32 bits")
    for key, values in family.only.items():
        if (found := content.get(key, values[0])) not in values:
            expected = f"which cannot be trained here; expected {values[0]!r}"
            raise DataError(f"{key} is {shown(found)}, {expected}")
    filled = _filled(family, content)
    flags = dict(family.flags) | {flag: filled[key] for key, flag in family.fields.items()}
    if flags.get("position-embedding-type") == "rope":
        add_rotary(flags, filled)
    flags |= family.read(filled)
    notes = _window(flags, filled)
    if flags.pop("num-query-groups", flags["num-attention-heads"]) != flags["num-attention-heads"]:
        flags |= {"group-query-attention": True, "num-query-groups": filled["num_key_value_heads"]}
    if not filled["tie_word_embeddings"]:
        flags["untie-embeddings-and-output-weights"] = True
    if not filled.get("norm_topk_prob", True):
        flags["moe-router-pre-softmax"] = True
    known = {*family.fields, *family.only, *family.usual, *family.silent, *_SILENT}
    notes += [
        f"{key} {shown(value)} is not mapped to a flag"
        for key, value in content.items()
        if key not in known and value not in (None, False, 0, 0.0, [], {})
    ]
    return flags, notes


def _renamed(family: Family, content: Config) -> Config:
    """The fields under the names that the family's table has."""
    renamed = dict(content)
    for other, name in _OTHER_NAMES.items():
        if other in content and name in family.fields:
            renamed.setdefault(name, renamed.pop(other))
    return renamed


def _filled(family: Family, content: Config) -> Config:
    """The mapped fields, with transformers' values for those that a file may lack."""
    filled = dict(family.usual) | content
    if "n_embd" in family.fields:
        filled["n_inner"] = content.get("n_inner") or 4 * _whole(content, "n_embd")
    else:
        heads = _whole(content, "num_attention_heads")
        filled["num_key_value_heads"] = filled.get("num_key_value_heads") or heads
        filled["head_dim"] = filled.get("head_dim") or _whole(content, "hidden_size") // heads
    for key in family.fields:
        usual = family.usual.get(key)
        if not isinstance(usual, float):
            _whole(filled, key)
            continue
        value = filled[key] = usual if filled[key] is None else filled[key]
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise DataError(f"{key} is {shown(value)}, expected a number from 0 on")
    return filled


def _whole(content: Config, key: str) -> int:
    value, most = content.get(key), _MOST.get(key, _MOST_OF_ALL)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise DataError(f"{key} is {shown(value)}, expected a whole number from 1 to {most}")
    return value


def _window(flags: dict[str, Any], filled: Config) -> list[str]:
    """Bound the positions by a sliding window, within which attention sees all tokens."""
    if "window-size" in flags:
        return []
    if not filled.get("sliding_window") or filled.get("use_sliding_window") is False:
        return []
    window = _whole(filled, "sliding_window")
    if window >= flags["max-position-embeddings"]:
        return []
    flags["max-position-embeddings"] = window
    return [f"sliding_window {window} is not mapped: samples may have {window} tokens at most"]
