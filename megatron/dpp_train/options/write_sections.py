"""Writes ``sections/``: the settings of a run as typed attributes, from the rows of flags.

Run ``python -m megatron.dpp_train.options.write_sections`` after a flag was added or changed. A
test compares the files with the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.dpp.config import option_fields
from megatron.dpp_train.options.fields import Row, core_fields
from megatron.dpp_train.options.flags import (
    DISTRIBUTED,
    MODEL,
    OPTIMIZER,
    TRAINING,
    UNSET_FIELDS,
    Flag,
)
from megatron.dpp_train.options.flags_run import CHECKPOINT, DATA, LOGGING, OURS, SEQUENCES
from megatron.dpp_train.options.flags_special import (
    FORMS,
    LATENT_ATTENTION,
    OLD_NAMES,
    PATTERNS,
    integers,
    pattern,
)

FOLDER = Path(__file__).with_name("sections")
ABOUT = {
    "model": "The model: sizes, layers, initialization, kernels, recomputation.",
    "parallel": "Parallel sizes, the layout of layers, and the reduction of gradients.",
    "batch": "Batch sizes, length of training, precision checks, seed.",
    "optimizer": "Optimizer, learning rate, loss scale, state of the optimizer.",
    "data": "Data sets, tokenizer, loaders, evaluation, sequences of unlike length.",
    "checkpoint": "Checkpoints: places, intervals, format.",
    "logging": "Log lines, TensorBoard, Weights & Biases, profiles, traces, metrics.",
    "pipeline": "The dynamic pipeline: schedule, transport, plan, device.",
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
_DERIVED: dict[str, dict[str, tuple[str, Any]]] = {
    "parallel": {
        "world_size": ("int", None),
        "data_parallel_size": ("int", None),
        "virtual_pipeline_model_parallel_size": ("int | None", None),
    },
    "model": {"params_dtype": ("Any", None)},
    "data": {
        "variable_lengths": ("bool", False),
        "variable_seq_lengths": ("bool", False),
        "loss_vocab_size": ("int | None", None),
        "length_multiple": ("int", 1),
        "length_buckets": ("tuple[int, ...]", ()),
        "slice_tokens": ("int | None", None),
        "holds_whole": ("bool", True),
    },
    "checkpoint": {"start": ("Any", None)},  # the checkpoint that a program found itself
}
"""Settings that no flag sets: section -> name -> type and value before validation."""
_BY_TORCH = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Names of dtypes, which become dtypes when PyTorch is there."""
_PARALLEL = ("parallel", "tp_", "pipeline", "overlap_p2p", "p2p", "cp_comm", "defer_embedding",
             "deallocate", "ub_", "nccl_ub", "expert_tensor", "finalize")  # fmt: skip

Field = tuple[str, str, Any]
"""Name, type and default."""


def fields_of_sections() -> dict[str, list[Field]]:
    """Section -> its fields, in the order of the rows."""
    found: dict[str, dict[str, Field]] = {section: {} for section in ABOUT}
    for section, field in _fields():
        if not any(field[0] in fields for fields in found.values()):
            found[section][field[0]] = field
    for section, more in _DERIVED.items():
        for name, (kind, default) in more.items():
            found[section][name] = (name, kind, default)
    return {section: list(fields.values()) for section, fields in found.items()}


def _fields() -> Iterator[tuple[str, Field]]:
    logged = [row for row in OURS if "trace" in row.name or row.name in _OF_LOGGING]
    rows = {
        "model": (*MODEL, *PATTERNS, *FORMS, *LATENT_ATTENTION, *OLD_NAMES),
        "parallel": DISTRIBUTED,
        "batch": TRAINING,
        "optimizer": OPTIMIZER,
        "data": (*DATA, *SEQUENCES),
        "checkpoint": CHECKPOINT,
        "logging": (*LOGGING, *logged),
        "pipeline": tuple(row for row in OURS if row not in logged),
    }
    own = {row.dest or row.name[2:].replace("-", "_") for each in rows.values() for row in each
           if row not in OLD_NAMES}  # fmt: skip
    for section, flags in rows.items():
        for row in flags:
            if row not in OLD_NAMES or _dest(row) not in own:
                yield section, _of_flag(row)
    for field in option_fields():
        kind = "str | None" if field.default is None else type(field.default).__name__
        yield "pipeline", (f"dpp_{field.name}", kind, field.default)
    for name, core in core_fields().items():
        for each in core:
            if each["name"] not in UNSET_FIELDS:
                yield _section_of(name, each["name"]), _of_row(each)


_OF_LOGGING = ("--metrics-file", "--estimate")


def _section_of(dataclass: str, name: str) -> str:
    if dataclass == "TransformerConfig":
        return "parallel" if any(part in name for part in _PARALLEL) else "model"
    return {
        "OptimizerConfig": "optimizer",
        "DistributedDataParallelConfig": "parallel",
    }.get(dataclass, "data")


def _dest(row: Flag) -> str:
    return row.dest or row.name[2:].replace("-", "_")


def _of_flag(row: Flag) -> Field:
    name = _dest(row)
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
        '"""A section of the settings, which ``cli.write_sections`` writes."""',
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
    lines += [f"class {section.title()}(Section):", f'    """{ABOUT[section]}"""', ""]
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
    FOLDER.mkdir(exist_ok=True)
    for section, fields in fields_of_sections().items():
        (FOLDER / f"{section}.py").write_text(text_of(section, fields), encoding="utf-8")


if __name__ == "__main__":
    main()
