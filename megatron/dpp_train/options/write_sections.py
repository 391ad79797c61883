"""Writes ``sections/``: the settings of a run as typed attributes, from the rows of flags.

Run ``python -m megatron.dpp_train.options.write_sections`` after a flag was added or changed. A
test compares the files with the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.dpp.config import option_fields
from megatron.dpp_train.options.fields import Row, core_fields
from megatron.dpp_train.options.flags import GROUPS, UNSET_FIELDS, Flag
from megatron.dpp_train.options.flags_run import RUN_GROUPS
from megatron.dpp_train.options.flags_special import SPECIAL, integers, pattern

FOLDER = Path(__file__).with_name("sections")
ABOUT = {
    "flags": "Settings of the tables of flags and of ``DppConfig``, and those that no flag sets.",
    "core": "The other fields of megatron-core's dataclasses.",
}
"""Section -> docstring of its class."""

REQUIRED = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "max_position_embeddings", "seq_length", "encoder_seq_length", "expert_tensor_parallel_size",
    "micro_batch_size", "global_batch_size", "start_weight_decay", "end_weight_decay",
    "padded_vocab_size", "tokenizer_type", "dataloader_type", "packing_budget", "save_interval",
    "num_query_groups", "train_iters", "lr",
}  # fmt: skip
"""Settings without a default that a checked run has, wherever they are read."""
Field = tuple[str, str, Any]
"""Name, type and default."""

_DERIVED: tuple[Field, ...] = (
    ("world_size", "int", None),
    ("data_parallel_size", "int", None),
    ("virtual_pipeline_model_parallel_size", "int | None", None),
    ("params_dtype", "Any", None),
    ("variable_lengths", "bool", False),
    ("variable_seq_lengths", "bool", False),
    ("loss_vocab_size", "int | None", None),
    ("model_origin", "str | None", None),
    ("tokenizer_tokens", "str | None", None),
    ("length_multiple", "int", 1),
    ("length_buckets", "tuple[int, ...]", ()),
    ("slice_tokens", "int | None", None),
    ("holds_whole", "bool", True),
    ("start", "Any", None),  # the checkpoint that a program found itself
)
"""Settings that no flag sets, before validation."""
_BY_TORCH = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Names of dtypes, which become dtypes when PyTorch is there."""


def fields_of_sections() -> dict[str, list[Field]]:
    """Section -> its fields, in the order of the rows; the first row of a name counts."""
    own: dict[str, Field] = {}
    core: dict[str, Field] = {}
    for field in (*_of_flags(), *_DERIVED):
        own.setdefault(field[0], field)
    for row in itertools.chain.from_iterable(core_fields().values()):
        if row["name"] not in own and row["name"] not in UNSET_FIELDS:
            core.setdefault(row["name"], _of_row(row))
    return {"flags": list(own.values()), "core": list(core.values())}


def _of_flags() -> Iterator[Field]:
    for rows in (GROUPS | RUN_GROUPS | SPECIAL).values():
        yield from map(_of_flag, rows)
    for field in option_fields():
        kind = "str | None" if field.default is None else type(field.default).__name__
        yield f"dpp_{field.name}", kind, field.default


def _of_flag(row: Flag) -> Field:
    name = row.dest or row.name[2:].replace("-", "_")
    kinds = {integers: "tuple[int, ...]", pattern: "int | list[int]"}
    kind = "bool" if isinstance(row.kind, bool) else kinds.get(row.kind) or row.kind.__name__
    return _field(name, kind, row.default, several=row.nargs is not None)


def _of_row(row: Row) -> Field:
    kind = "Any" if row["kind"] == "enum" else row["kind"]
    return _field(row["name"], kind, row.get("unset", row["default"]), several="nargs" in row)


def _field(name: str, kind: str, default: Any, *, several: bool) -> Field:
    if several:
        one = default is not None and not isinstance(default, (list, tuple))
        kind = f"{kind} | Sequence[{kind}]" if one else f"Sequence[{kind}]"
    if name in _BY_TORCH:
        kind = "Any"
    if isinstance(default, list):
        default = tuple(default)
    if default is None and name not in REQUIRED and kind != "Any":
        kind = f"{kind} | None"
    return name, kind, default


def text_of(section: str, fields: list[Field]) -> str:
    """The file of a section."""
    lines = [
        '"""A section of the settings, which ``write_sections`` writes."""',
        "",
        "from __future__ import annotations",
        "",
    ]
    kinds = " ".join(kind for _, kind, _ in fields)
    lines += ["from collections.abc import Sequence"] if "Sequence" in kinds else []
    lines += ["from typing import Any"] if "Any" in kinds else []
    lines += [""] if lines[-1] else []
    unset = any(_is_unset(field) for field in fields)
    names = "UNSET, Section" if unset else "Section"
    lines += [f"from megatron.dpp_train.options.section import {names}", "", ""]
    lines += [f"class {section.title()}Section(Section):", f'    """{ABOUT[section]}"""', ""]
    for field in fields:
        name, kind, default = field
        lines.append(f"    {name}: {kind} = {'UNSET' if _is_unset(field) else _literal(default)}")
    return "\n".join(lines) + "\n"


def _is_unset(field: Field) -> bool:
    _, kind, default = field
    return default is None and "None" not in kind and kind != "Any"


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def main() -> None:
    """Write all sections."""
    for section, fields in fields_of_sections().items():
        (FOLDER / f"{section}.py").write_text(text_of(section, fields), encoding="utf-8")


if __name__ == "__main__":
    main()
