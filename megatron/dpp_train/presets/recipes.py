"""The launch scripts (``run_*.sh``, ``examples/*/train_*.sh``): variables to options of ``train``.

``train --preset RECIPE ROLE [PATHS] [FLAGS]``. Variables come from positional paths, else the
environment, else the recipe.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.dpp.errors import ConfigError, require
from megatron.dpp_train.presets.flags import Flags, from_argv, number, shared
from megatron.dpp_train.presets.nodes import own_address
from megatron.dpp_train.presets.options import CHUNKS
from megatron.dpp_train.presets.tokens import sample_vocabulary

ROLES = ("node", "master", "worker")
Variables = dict[str, str]

_PATHS = {
    "gpt": ("CHECKPOINT_PATH", "TENSORBOARD_PATH", "VOCAB_FILE", "MERGE_FILE", "DATA_PATH"),
    "bert": ("CHECKPOINT_PATH", "TENSORBOARD_PATH", "VOCAB_FILE", "DATA_PATH"),
}
"""Variables that positional arguments give, as in Megatron-LM's examples."""
_SWITCHES = {
    "USE_DPP": "--use-dpp",
    "TRACE": "--dpp-trace",
    "RECOMPUTE": "--recompute-activations",
}
"""Variables that are 0 or 1 -> the flag of 1."""


def tables() -> dict[str, Variables]:
    """The recipes of ``configs/recipes.yaml``."""
    import yaml

    found: dict[str, Variables] = yaml.safe_load(
        (shared("configs") / "recipes.yaml").read_text(encoding="utf-8")
    )
    return found


def settings_of(recipe: str, role: str, env: Mapping[str, str], gpus: int) -> Variables:
    """Every setting of a recipe. A variable that is empty counts as not set.

    Args:
        recipe: ``gpt`` or ``bert``, with ``-sample`` for the sizes of ``run_*.sh``.
        gpus: of this machine.

    Raises:
        ConfigError: no recipe or role, or no GPU to count.
    """
    known = tables()
    model, _, sample = recipe.partition("-")
    if model not in _PATHS or role not in ROLES:
        raise ConfigError(f"--preset {recipe} {role}: expected gpt, bert, gpt-sample or "
                          f"bert-sample, and {', '.join(ROLES)}")  # fmt: skip
    given = {name: value for name, value in env.items() if value}
    if role != "node":
        given.setdefault("NUM_NODES", "2")
    if role == "worker":
        given.setdefault("NODE_RANK", "1")
    elif role == "master":
        given.setdefault("NODE_RANK", "0")
        given.setdefault("MASTER_ADDR", own_address())
    if "NUM_GPUS" in given:  # the earlier scripts' name
        given.setdefault("GPUS_PER_NODE", given["NUM_GPUS"])
    if sample:
        sizes = known.get(f"{model}-sample-{'gpu' if gpus else 'cpu'}", {})
        given = _sample_settings(sizes, given, gpus)
    elif gpus:
        given.setdefault("GPUS_PER_NODE", str(gpus))
    settings = known["shared"] | known[model] | given
    require(
        settings["GPUS_PER_NODE"],
        "no GPU was found; run_single_gpt.sh and run_single_bert.sh run without one, and here "
        "GPUS_PER_NODE=4 starts four processes on the CPU",
    )
    return settings


def _sample_settings(sizes: Variables, given: Variables, gpus: int) -> Variables:
    """``given`` above the sizes of ``run_*.sh``: everything at hand in one pipeline. Without a GPU
    that is four processes on one node, two on each of several."""
    nodes = number(given, "NUM_NODES")
    values = {
        "GPUS_PER_NODE": str(gpus or (2 if nodes > 1 else 4)),
        "TENSOR_PARALLEL": "1" if gpus else "2",
        "PRECISION": "bf16" if gpus else "fp32",
        **given,
    }
    ranks = number(values, "GPUS_PER_NODE") * nodes
    pipeline = max(1, ranks // number(values, "TENSOR_PARALLEL"))
    values = {"PIPELINE_PARALLEL": str(pipeline), **values}
    pipeline = number(values, "PIPELINE_PARALLEL")
    values = {"MODEL_CHUNKS": "2" if pipeline > 1 else "1", **values}
    stages = pipeline * number(values, "MODEL_CHUNKS")
    layers = 8 // stages * stages if stages < 4 else stages * 2
    values = {"NUM_LAYERS": str(layers), "MICRO_BATCH_SIZE": "4", **values}
    batch = number(values, "MICRO_BATCH_SIZE") * pipeline * 4
    rest = {"GLOBAL_BATCH_SIZE": str(batch), "RECOMPUTE": "0", "EVAL_ITERS": "2", "TRACE": "1"}
    return {**rest, **sizes, **values}


def take_paths(model: str, words: Sequence[str]) -> tuple[Variables, list[str]]:
    """Positional paths as settings, and the flags behind them.

    Raises:
        ConfigError: more paths than there are settings for them.
    """
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    names = _PATHS.get(model, ())
    if count > len(names):
        raise ConfigError(f"unexpected argument {words[len(names)]!r}: flags start with --")
    return dict(zip(names, words[:count], strict=False)), list(words[count:])


def flags_of(model: str, settings: Mapping[str, str], further: Sequence[str]) -> Flags:
    """Megatron's flags of a recipe's settings. ``further`` flags win.

    Raises:
        ConfigError: a switch is neither 0 nor 1, or a precision is not known.
    """
    choices = dict.fromkeys(_SWITCHES, ("0", "1")) | {"PRECISION": ("fp32", "bf16", "fp16")}
    for name, known in choices.items():
        rule = f"expected one of {', '.join(known)}"
        require(settings[name] in known, f"{name}={settings[name]}: {rule}")
    precision = settings["PRECISION"]
    named = tables()
    flags: Flags = {flag: settings[n] for n, flag in named["flags"].items() if settings.get(n)}
    if settings["TRANSFORMER_IMPL"] == "auto":
        del flags["--transformer-impl"]
    if settings["DATA_PATH"]:
        flags["--data-path"] = settings["DATA_PATH"].split()
        if not (settings["VOCAB_FILE"] or {"--vocab-file", "--tokenizer-type"} & {*further}):
            flags |= sample_vocabulary(model)
    if settings["MODEL_CHUNKS"] == "1":
        del flags[CHUNKS]
    if settings["CHECKPOINT_PATH"]:
        flags["--load"] = settings["CHECKPOINT_PATH"]
    flags |= named[f"{model}-training"] | {"--split": "949,50,1", "--attention-backend": "auto"}
    flags |= {"--max-position-embeddings": settings["SEQ_LENGTH"],
              "--lr-decay-iters": settings["TRAIN_ITERS"]}  # fmt: skip
    flags |= {flag: True for name, flag in _SWITCHES.items() if settings[name] == "1"}
    if "--use-dpp" not in flags and flags.pop("--dpp-trace", False):
        flags["--dpp-trace-only"] = True
    if precision != "fp32":
        flags[f"--{precision}"] = True
    if precision == "fp16":
        flags["--initial-loss-scale"] = 65536
    return flags | from_argv(further)


def misspelt(env: Mapping[str, str]) -> list[str]:
    """A line for each variable whose name is nearly that of a setting.

    >>> misspelt({"PIPELINE_PARALEL": "4", "HOME": "/root"})
    ['PIPELINE_PARALEL is no setting (did you mean PIPELINE_PARALLEL?)']
    """
    known = tables()
    settings = [*known["flags"], *known["shared"]]
    lines = []
    for name in sorted(set(env) - set(settings)):
        near = difflib.get_close_matches(name, settings, n=1, cutoff=0.88)
        lines += [f"{name} is no setting (did you mean {near[0]}?)"] if near else []
    return lines


def in_variables(text: str, settings: Mapping[str, Any]) -> str:
    """An error's text with the variables that its user knows in the place of their flags.

    >>> in_variables("--num-layers 7 is odd", {"NUM_LAYERS": "7"})
    'NUM_LAYERS=7 is odd'
    """
    for name, flag in tables()["flags"].items():
        if settings.get(name):
            text = re.sub(rf"{flag} {re.escape(str(settings[name]))}(?=[\s:;,]|$)",
                          f"{name}={settings[name]}", text)  # fmt: skip
            text = re.sub(rf"(?<!\w){flag}(?![\w-])", name, text)
    return text
