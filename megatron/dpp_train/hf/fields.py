"""Fields of Hugging Face's ``config.json`` as flags of training, by the tables of families.

A field that changes what a model computes is mapped or refused. One that says how to train or to
generate may be left, and a note names it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp_train.hf.families import Config, Family, Sizes, find_families
from megatron.dpp_train.hf.families.rotary import add_rotary
from megatron.dpp_train.hf.forms import FLAG, NAMES, Forms
from megatron.dpp_train.text_files import read_json

CONFIG = "config.json"
_MOST_CONFIG_BYTES = 1 << 24
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
    sizes: Sizes
    flags: dict[str, Any]
    notes: tuple[str, ...] = ()

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


def read_config(folder: str | Path, family_file: str | Path | None = None) -> HfConfig:
    """The ``config.json`` in a folder of a Hugging Face model.

    Args:
        family_file: a Python file with a further family.

    Raises:
        DataError: there is none, or a model of this kind cannot be trained here.
    """
    path = Path(folder) / CONFIG
    content = read_json(inside(Path(folder), CONFIG), most=_MOST_CONFIG_BYTES)
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object")
    return parse_config(content, str(path), family_file)


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a model's folder.

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


def parse_config(content: Config, where: str, family_file: str | Path | None = None) -> HfConfig:
    """Flags and sizes of a ``config.json``.

    Args:
        where: its name, for errors.
        family_file: a Python file with a further family.

    Raises:
        DataError: a field is missing, or has a value that cannot be trained here.
    """
    family = _family_of(content.get("model_type"), where, family_file)
    original, content = content, _renamed(family, asked(family.prepare, content, family, where))
    if content.get("quantization_config"):
        raise DataError(f"{where}: a quantized model; convert needs one in 16 or 32 bits")
    for key, values in family.only.items():
        if content.get(key, values[0]) not in values:
            raise DataError(
                f"{where}: {key} is {shown(content[key])}, which cannot be trained here; expected "
                f"{values[0]!r}"
            )
    filled = _filled(family, content, where)
    flags = dict(family.flags)
    for key, flag in family.fields.items():
        flags[flag] = filled[key]
    if flags.get("position-embedding-type") == "rope":
        add_rotary(flags, filled, where)
    flags |= asked(family.read, filled, family, where)
    notes = [f"{where}: {text}" for text in _window(flags, filled, where)]
    if flags.pop("num-query-groups", flags["num-attention-heads"]) != flags["num-attention-heads"]:
        flags |= {"group-query-attention": True, "num-query-groups": filled["num_key_value_heads"]}
    if not filled["tie_word_embeddings"]:
        flags["untie-embeddings-and-output-weights"] = True
    if not filled.get("norm_topk_prob", True):
        flags["moe-router-pre-softmax"] = True
    known = {*family.fields, *family.only, *family.silent, *_SILENT}
    notes += [
        f"{where}: {key} {shown(value)} is not mapped to a flag"
        for key, value in content.items()
        if key not in known and value not in (None, False, 0, 0.0, [], {})
    ]
    sizes = _sizes(flags)
    if sizes.layers * sizes.experts > _MOST_EXPERTS:
        raise DataError(f"{where}: {sizes.layers} layers of {sizes.experts} experts are too many")
    return HfConfig(family=family, content=original, sizes=sizes, flags=flags, notes=tuple(notes))


def _family_of(name: Any, where: str, family_file: str | Path | None) -> Family:
    families = find_families(family_file)
    if str(name) in families:
        return families[str(name)]
    raise DataError(
        f"{where}: model_type {shown(name)} is not supported; expected one of "
        f"{', '.join(sorted(families))}, or a family of your own (--family-file)"
    )


def asked(
    function: Callable[[Any], dict[str, Any]], content: Any, family: Family, where: str
) -> dict[str, Any]:
    """The result of a family's own function; raises DataError where it fails."""
    try:
        return function(content)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(
            f"{where}: family {family} cannot read its fields ({type(error).__name__}: "
            f"{one_line(error)})"
        ) from error


def _renamed(family: Family, content: Config) -> Config:
    """The fields under the names that the family's table has."""
    renamed = dict(content)
    for other, name in _OTHER_NAMES.items():
        if other in content and name in family.fields:
            renamed.setdefault(name, renamed.pop(other))
    return renamed


def _filled(family: Family, content: Config, where: str) -> Config:
    """The mapped fields, with transformers' values for those that a file may lack."""
    filled = dict(family.usual) | content
    if "n_embd" in family.fields:
        filled["n_inner"] = content.get("n_inner") or 4 * _whole(content, "n_embd", where)
    else:
        heads = _whole(content, "num_attention_heads", where)
        filled["num_key_value_heads"] = filled.get("num_key_value_heads") or heads
        if not filled.get("head_dim"):
            filled["head_dim"] = _whole(content, "hidden_size", where) // heads
    for key in family.fields:
        if not isinstance(family.usual.get(key), float):
            _whole(filled, key, where)
            continue
        if filled[key] is None:
            filled[key] = family.usual[key]
        if not isinstance(filled[key], int | float) or not 0 <= filled[key] < math.inf:
            raise DataError(f"{where}: {key} is {shown(filled[key])}, expected a number from 0 on")
    return filled


def _whole(content: Config, key: str, where: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"{where}: {key} is {shown(value)}, expected a whole number above 0")
    most = _MOST.get(key, _MOST_OF_ALL)
    if value > most:
        raise DataError(f"{where}: {key} is {value}, expected at most {most}")
    return value


def _window(flags: dict[str, Any], filled: Config, where: str) -> list[str]:
    """Bound the positions by a sliding window, within which attention sees all tokens."""
    if "window-size" in flags:
        return []
    if not filled.get("sliding_window") or filled.get("use_sliding_window") is False:
        return []
    window = _whole(filled, "sliding_window", where)
    if window >= flags["max-position-embeddings"]:
        return []
    flags["max-position-embeddings"] = window
    return [f"sliding_window {window} is not mapped: samples may have {window} tokens at most"]


def _sizes(flags: dict[str, Any]) -> Sizes:
    heads = flags["num-attention-heads"]
    return Sizes(
        layers=flags["num-layers"],
        hidden=flags["hidden-size"],
        ffn=flags["ffn-hidden-size"],
        heads=heads,
        groups=flags.get("num-query-groups", heads),
        head=flags.get("kv-channels", flags["hidden-size"] // heads),
        vocab=flags["padded-vocab-size"],
        positions=flags["max-position-embeddings"],
        experts=flags.get("num-experts", 0),
        expert_ffn=flags.get("moe-ffn-hidden-size", flags["ffn-hidden-size"]),
        untied="untie-embeddings-and-output-weights" in flags,
        flags=flags,
        sparse=_sparse(flags),
    )


def _sparse(flags: dict[str, Any]) -> tuple[bool, ...]:
    """The layers that hold experts, where not all do."""
    every = flags.get("moe-layer-freq", 1)
    if "num-experts" not in flags or every == 1:
        return ()
    found = ast.literal_eval(str(every))
    if isinstance(found, list):
        return tuple(map(bool, found))
    return tuple(layer % found == 0 for layer in range(flags["num-layers"]))
