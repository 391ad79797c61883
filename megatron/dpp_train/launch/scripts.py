"""The launch scripts (``run_*.sh``, ``examples/*/train_*.sh``): from variables to one torchrun.

They are presets of ``train``: ``train --preset RECIPE ROLE [PATHS] [FLAGS]``, or ``--preset flags
SCRIPT FLAGS`` for a training script whose flags are all given. ``examples/launch.sh`` calls it.
Variables come from positional paths, else the environment, else the recipe. They are checked before
set-up, which needs minutes; nothing here needs a package before that.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.dpp.errors import ConfigError, DataError, require, use_names
from megatron.dpp.flags import given_flags
from megatron.dpp.hosts import addresses, is_loopback
from megatron.dpp.naming import renamed
from megatron.dpp.processes import run_child
from megatron.dpp_train.cost.device import find_gpus
from megatron.dpp_train.launch.flags import ROOT, Flags, from_argv, to_argv
from megatron.dpp_train.launch.job import (
    Job,
    find_job,
    is_dry_run,
    launch,
    refuse_taken,
    show_command,
    whole_variable,
)
from megatron.dpp_train.launch.layers import default_layers
from megatron.dpp_train.launch.nodes import refuse_tasks
from megatron.dpp_train.launch.start import go_on, prepare, set_up
from megatron.dpp_train.options import environment
from megatron.dpp_train.options.arguments import build_parser, give, parse_args
from megatron.dpp_train.options.layers import AUTO, ENGINE, LOCAL
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.options.validate import check_sizes

_ROLES = ("node", "master", "worker")

Variables = dict[str, str]
"""Name of a variable -> value."""

RECIPES: dict[str, Variables] = {
    "gpt": {
        "NUM_LAYERS": "16", "HIDDEN_SIZE": "2048", "NUM_ATTENTION_HEADS": "32",
        "SEQ_LENGTH": "1024", "MICRO_BATCH_SIZE": "1", "GLOBAL_BATCH_SIZE": "16", "LR": "6.0e-5",
        "MIN_LR": "6.0e-6", "INIT_METHOD_STD": "0.006",
        "VOCAB_FILE": f"{ROOT}/datasets_gpt/vocab.json",
        "MERGE_FILE": f"{ROOT}/datasets_gpt/merges.txt",
    },
    "bert": {
        "NUM_LAYERS": "24", "HIDDEN_SIZE": "1024", "NUM_ATTENTION_HEADS": "16",
        "SEQ_LENGTH": "512", "MICRO_BATCH_SIZE": "4", "GLOBAL_BATCH_SIZE": "32", "LR": "1.0e-4",
        "MIN_LR": "1.0e-5", "VOCAB_FILE": f"{ROOT}/datasets_bert/vocab.txt",
    },
}  # fmt: skip
"""Published recipes; ``options.environment`` has the defaults that both models share."""
SAMPLES: dict[tuple[str, bool], Variables] = {
    ("gpt", False): {
        "HIDDEN_SIZE": "128", "NUM_ATTENTION_HEADS": "4", "SEQ_LENGTH": "128",
        "TRAIN_ITERS": "50", "LR": "2.0e-3", "MIN_LR": "2.0e-4", "INIT_METHOD_STD": "0.04",
        "LR_WARMUP_FRACTION": "0.1",
    },
    ("gpt", True): {
        "HIDDEN_SIZE": "2048", "NUM_ATTENTION_HEADS": "16", "SEQ_LENGTH": "1024",
        "TRAIN_ITERS": "100", "LR": "3.0e-4", "MIN_LR": "3.0e-5", "INIT_METHOD_STD": "0.02",
    },
    ("bert", False): {
        "HIDDEN_SIZE": "128", "NUM_ATTENTION_HEADS": "4", "SEQ_LENGTH": "128",
        "TRAIN_ITERS": "50", "LR": "2.0e-3", "MIN_LR": "2.0e-4",
    },
    ("bert", True): {
        "HIDDEN_SIZE": "1024", "NUM_ATTENTION_HEADS": "16", "SEQ_LENGTH": "512",
        "TRAIN_ITERS": "100", "LR": "2.0e-4", "MIN_LR": "2.0e-5",
    },
}  # fmt: skip
"""(model, on GPUs) -> sizes of the ``run_*.sh`` scripts."""

_PATHS = {
    "gpt": ("CHECKPOINT_PATH", "TENSORBOARD_PATH", "VOCAB_FILE", "MERGE_FILE", "DATA_PATH"),
    "bert": ("CHECKPOINT_PATH", "TENSORBOARD_PATH", "VOCAB_FILE", "DATA_PATH"),
}
"""Variables that positional arguments give, as in Megatron-LM's examples."""

_SIZES = (
    "--num-layers {NUM_LAYERS} --hidden-size {HIDDEN_SIZE} "
    "--num-attention-heads {NUM_ATTENTION_HEADS} --seq-length {SEQ_LENGTH} "
    "--max-position-embeddings {SEQ_LENGTH}"
)
_BATCH = "--micro-batch-size {MICRO_BATCH_SIZE} --global-batch-size {GLOBAL_BATCH_SIZE}"
_TOKENIZER = {
    "gpt": "--tokenizer-type GPT2BPETokenizer --vocab-file {VOCAB_FILE} --merge-file {MERGE_FILE}",
    "bert": "--tokenizer-type BertWordPieceLowerCase --vocab-file {VOCAB_FILE}",
}
_TRAINING = {
    "gpt": "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--init-method-std {INIT_METHOD_STD} --clip-grad 1.0 --lr {LR} --lr-decay-style cosine "
    "--min-lr {MIN_LR}",
    "bert": "--weight-decay 1e-2 --clip-grad 1.0 --lr {LR} --lr-decay-style linear "
    "--min-lr {MIN_LR}",
}
_LAYOUT = (
    "--tensor-model-parallel-size {TENSOR_PARALLEL} "
    "--pipeline-model-parallel-size {PIPELINE_PARALLEL}"
)
_RUN = (
    "--train-iters {TRAIN_ITERS} "
    "--lr-decay-iters {TRAIN_ITERS} --lr-warmup-fraction {LR_WARMUP_FRACTION} --seed {SEED}"
)
_INTERVALS = (
    "--log-interval {LOG_INTERVAL} --save-interval {SAVE_INTERVAL} "
    "--eval-interval {EVAL_INTERVAL} --eval-iters {EVAL_ITERS}"
)
_CHUNKS = "--num-virtual-stages-per-pipeline-rank {MODEL_CHUNKS}"
_ANY = None
_OPTIONAL = (
    *(("TRANSFORMER_IMPL", name, f"--transformer-impl {name}") for name in (ENGINE, LOCAL)),
    ("PRECISION", "fp16", "--fp16 --initial-loss-scale 65536"),
    ("PRECISION", "bf16", "--bf16"),
    ("RECOMPUTE", "1", "--recompute-activations"),
    ("USE_DPP", "1", "--use-dpp"),
    ("WORKLOAD", _ANY, "--workload {WORKLOAD}"),
    ("TRACE", "1", "--trace"),
    ("CHECKPOINT_PATH", _ANY, "--save {CHECKPOINT_PATH} --load {CHECKPOINT_PATH}"),
    ("TENSORBOARD_PATH", _ANY, "--tensorboard-dir {TENSORBOARD_PATH}"),
)
"""(setting, its value, flags that follow) in the order of the command."""

WHOLE = (
    "PIPELINE_PARALLEL", "MODEL_CHUNKS", "TENSOR_PARALLEL", "GPUS_PER_NODE", "NUM_NODES",
    "NUM_LAYERS", "HIDDEN_SIZE", "NUM_ATTENTION_HEADS", "SEQ_LENGTH", "MICRO_BATCH_SIZE",
    "GLOBAL_BATCH_SIZE", "TRAIN_ITERS", "WAIT_SECONDS",
)  # fmt: skip
"""Variables that are whole numbers of at least 1."""


def start(words: Sequence[str]) -> None:
    """Start a preset; returns from a dry run only.

    Args:
        words: those behind ``train --preset``.

    Raises:
        DppError: settings, flags or files that cannot work.
    """
    refuse_tasks(os.environ)
    os.environ["DPP_GO_ON"] = "the same command with --load"
    first, second, *rest = words if len(words) > 1 else ("", "")
    if first == "flags":
        run_flags(second, rest)
    elif (first.removesuffix("-sample") in RECIPES) and second in _ROLES:
        run_recipe(first, second, rest)
    else:
        raise ConfigError(
            f"examples/launch.sh {' '.join(words[:2])}: expected gpt, bert, gpt-sample or "
            f"bert-sample, and {', '.join(_ROLES)}; or flags SCRIPT"
        )


def run_flags(script: str, argv: Sequence[str]) -> None:
    """Start a training script whose flags are all given."""
    given = os.environ.get("GPUS_PER_NODE") or os.environ.get("NUM_GPUS")
    job = find_job({**os.environ, "GPUS_PER_NODE": given or _found_gpus(os.environ)})
    words = [*argv, *to_argv(job.flags())]
    parsed = parse_args(words)
    if not is_dry_run():
        refuse_taken(job, parsed)  # before minutes of set-up
    python = _find_python(["flags", script, *argv])
    launch(job, python, script, words, parsed)


def run_recipe(recipe: str, role: str, words: Sequence[str]) -> None:
    """Start a recipe: ``gpt`` or ``bert``, with ``-sample`` for the sizes of ``run_*.sh``.

    Args:
        role: ``node``, or ``master`` or ``worker`` of a run over several nodes.
    """
    model, _, sample = recipe.partition("-")
    given, further = take_paths(model, words)
    for line in misspelt(os.environ):
        print(f"warning: {line}", file=sys.stderr)
    settings = settings_of(model, role, {**os.environ, **given}, sample=bool(sample))
    job, parsed = check_settings(model, settings, further)
    if not is_dry_run():
        refuse_taken(job, parsed)  # before minutes of set-up
        environment.check_visible_gpus(os.environ)
    python = _find_python([recipe, role, *words])
    settings = _with_layers(model, settings, parsed, python)
    data = settings["DATA_PATH"].split() or sample_tokens(model, settings, python)
    if parsed.data_path == []:  # no flag names other data
        give(parsed, {"--data-path": data})
    flags = [*flags_of(model, settings, data, job), *further]
    launch(job, python, f"pretrain_{model}.py", flags, parsed)


def _find_python(words: Sequence[str]) -> str:
    """The interpreter that training runs with: this one, or this process goes on with it. A dry
    run sets nothing up, and only names it."""
    setup = ("bash", str(ROOT / "tools" / "setup.sh"))
    if is_dry_run():
        return set_up((*setup, "--which"))
    return go_on(setup, ["megatron.dpp", "train", "--preset", *words])


def misspelt(env: Mapping[str, str]) -> list[str]:
    """A line for each variable whose name is nearly that of a setting.

    >>> misspelt({"PIPELINE_PARALEL": "4", "HOME": "/root"})
    ['PIPELINE_PARALEL is no setting (did you mean PIPELINE_PARALLEL?)']
    """
    settings = [*RECIPES["gpt"], *environment.DEFAULTS, "GPUS_PER_NODE"]
    lines = []
    for name in sorted(set(env) - set(environment.VARIABLES)):
        near = difflib.get_close_matches(name, settings, n=1, cutoff=0.88)
        lines += [f"{name} is no setting (did you mean {near[0]}?)"] if near else []
    return lines


def take_paths(model: str, words: Sequence[str]) -> tuple[Variables, list[str]]:
    """Positional paths as settings, and the flags behind them.

    Raises:
        ConfigError: more paths than there are settings for them.
    """
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    names = _PATHS[model]
    require(
        count <= len(names),
        f"unexpected argument {(words[len(names) :] or [''])[0]!r}: flags of the training script "
        "start with --",
    )
    return dict(zip(names, words[:count], strict=False)), list(words[count:])


def _found_gpus(env: Mapping[str, str]) -> str:
    """``GPUS_PER_NODE`` where it is not set; a ConfigError where no GPU is found."""
    gpus = environment.count_gpus(env)
    require(
        gpus,
        "no GPU was found; run_single_gpt.sh and run_single_bert.sh run without one, and here "
        "GPUS_PER_NODE=4 starts four processes on the CPU",
    )
    return str(gpus)


def settings_of(model: str, role: str, env: Mapping[str, str], *, sample: bool) -> Variables:
    """Every setting of a recipe. A variable that is empty counts as not set.

    Raises:
        ConfigError: there is no GPU to count, or a worker does not know its master.
    """
    given = {name: value for name, value in env.items() if value}
    roles: Variables = {} if role == "node" else {"NUM_NODES": "2"}
    if role == "worker":
        require(
            "MASTER_ADDR" in given,
            "MASTER_ADDR is not set: name the host of the master (NODE_RANK=0)",
        )
        roles["NODE_RANK"] = "1"
    elif role == "master":
        own = [each for each in addresses() if not is_loopback(each)]
        roles["MASTER_ADDR"] = (own or ["localhost"])[0]
    given = {**roles, **given}
    if "NUM_GPUS" in given:  # the earlier scripts' name
        given.setdefault("GPUS_PER_NODE", given["NUM_GPUS"])
    if sample:
        given = sample_settings(model, given, environment.count_gpus(env))
    defaults = {**environment.DEFAULTS, **RECIPES[model]}
    settings = {name: given.get(name, default) for name, default in defaults.items()}
    settings["GPUS_PER_NODE"] = given.get("GPUS_PER_NODE") or _found_gpus(env)
    if not env.get("MASTER_PORT"):
        settings["MASTER_PORT"] = ""
    return settings


def sample_settings(model: str, given: Variables, gpus: int) -> Variables:
    """``given`` above the sizes of ``run_*.sh``: everything at hand in one pipeline. Without a GPU
    that is four processes on one node, two on each of several."""
    values = {"NUM_NODES": "1", **given}
    on_gpu = gpus > 0
    several = whole_variable("NUM_NODES", values) > 1
    values = {
        "GPUS_PER_NODE": str(gpus) if on_gpu else "2" if several else "4",
        "TENSOR_PARALLEL": "1" if on_gpu else "2",
        "PRECISION": "bf16" if on_gpu else "fp32",
        **values,
    }
    nodes, per_node, tensor = (
        whole_variable(name, values) for name in ("NUM_NODES", "GPUS_PER_NODE", "TENSOR_PARALLEL")
    )
    values = {"PIPELINE_PARALLEL": str(max(1, per_node * nodes // tensor)), **values}
    pipeline = whole_variable("PIPELINE_PARALLEL", values)
    values = {"MODEL_CHUNKS": "2" if pipeline > 1 else "1", **values}
    stages = pipeline * whole_variable("MODEL_CHUNKS", values)
    layers = 8 // stages * stages if stages < 4 else stages * 2
    values = {"NUM_LAYERS": str(layers), "MICRO_BATCH_SIZE": "4", **values}
    batch = whole_variable("MICRO_BATCH_SIZE", values) * pipeline * 4
    rest = {"GLOBAL_BATCH_SIZE": str(batch), "RECOMPUTE": "0", "EVAL_ITERS": "2", "TRACE": "1"}
    return {**rest, **SAMPLES[model, on_gpu], **values}


def check_settings(
    model: str, settings: Variables, further: Sequence[str] = ()
) -> tuple[Job, Settings]:
    """Refuse settings that cannot work, in milliseconds and before anything starts: a ConfigError
    or DataError names the variable.

    Args:
        further: flags behind those of the recipe, which win.

    Returns:
        The job, and all flags but ``--data-path``, parsed.
    """
    for name in WHOLE:
        whole_variable(name, settings)
    job = find_job(settings)
    parsed = parse_args([*flags_of(model, settings, (), job), *further])
    draft, overridden = parsed.draft(), given_flags(build_parser(), further)
    chunks = int(settings["MODEL_CHUNKS"])
    if chunks > 1 and "num_layers_per_virtual_pipeline_stage" not in overridden:
        draft.num_layers_per_virtual_pipeline_stage = None  # by the variable, for errors
        draft.num_virtual_stages_per_pipeline_rank = chunks
    variables = _variables(f"{_SIZES} {_LAYOUT} {_BATCH} {_CHUNKS}")
    own = {name: variable for name, variable in variables.items() if name not in overridden}
    with use_names(renamed(own, "=")):
        check_sizes(draft, job.world_size)
    _check_data(settings["DATA_PATH"])
    layers = settings["TRANSFORMER_IMPL"]
    require(
        layers in (AUTO, ENGINE, LOCAL),
        f"TRANSFORMER_IMPL={layers}: must be {AUTO}, {LOCAL} or {ENGINE}",
    )
    for name in ("USE_DPP", "TRACE", "RECOMPUTE"):
        require(settings[name] in ("0", "1"), f"{name}={settings[name]}: must be 0 or 1")
    precision = settings["PRECISION"]
    require(
        precision in ("fp32", "bf16", "fp16"),
        f"PRECISION={precision}: must be fp32, bf16 or fp16",
    )
    for name in ("VOCAB_FILE", "MERGE_FILE")[: 2 if model == "gpt" else 1]:
        path = settings[name]
        if not (Path(path).is_file() and os.access(path, os.R_OK)):
            raise DataError(f"{name}={path}: no such file, or it cannot be read")
    return job, parsed


def _with_layers(model: str, settings: Variables, parsed: Settings, python: str) -> Variables:
    """``settings`` with the run's layers in the place of ``auto``; prints a line about them.

    Args:
        python: the interpreter that training runs with, which a dry run has not become.
    """
    if settings["TRANSFORMER_IMPL"] != AUTO:
        return settings
    on_gpu = environment.count_gpus(os.environ) > 0
    gpus = find_gpus() if on_gpu else None
    is_ampere = gpus is not None and gpus.device.bf16
    layers = default_layers(parsed, model, on_gpu=on_gpu, is_ampere=is_ampere, python=python)
    if layers is None:  # a flag behind those of the recipe
        return settings | {"TRANSFORMER_IMPL": parsed.transformer_impl}
    if on_gpu:
        print(layers.line(), flush=True)
    give(parsed, {"--transformer-impl": layers.name})
    return settings | {"TRANSFORMER_IMPL": layers.name}


def _variables(template: str) -> dict[str, str]:
    """Setting -> variable of a template's flags.

    >>> _variables("--num-layers {NUM_LAYERS}")
    {'num_layers': 'NUM_LAYERS'}
    """
    flags, fields = template.split()[::2], template.split()[1::2]
    return {
        flag.strip("-").replace("-", "_"): field.strip("{}")
        for flag, field in zip(flags, fields, strict=True)
    }


def _check_data(text: str) -> None:
    """``DATA_PATH`` is one prefix, or weights and prefixes as ``--data-path`` takes them."""
    for word in text.split():
        for suffix in () if re.fullmatch(r"[0-9.]+", word) else (".bin", ".idx"):
            if not Path(word + suffix).is_file():
                raise DataError(
                    f"DATA_PATH={text}: {word}{suffix} is missing; tools/preprocess_data.py makes "
                    "it from JSON lines (DATA_PATH is its --output-prefix with _text_document or "
                    "_text_sentence added)"
                )


def sample_tokens(model: str, settings: Variables, python: str) -> list[str]:
    """The prefix of the sample corpus's token files, which are made where they are missing.

    Raises:
        DataError: they cannot be made.
    """
    flags: Flags = from_argv(_words(_TOKENIZER[model], settings))
    data = prepare(model, None, flags)
    if data.preparation:
        words = [python, *data.preparation]
        if is_dry_run():
            show_command(words)
        elif run_child(words):
            raise DataError("the sample corpus could not be preprocessed")
    return [str(data.flags["--data-path"])]


def flags_of(model: str, settings: Variables, data: Sequence[str], job: Job) -> list[str]:
    """The flags of the training script."""
    words = [
        *_words(f"{_SIZES} --attention-backend auto {_BATCH} {_TRAINING[model]}", settings),
        *_words(f"{_TOKENIZER[model]} --split 949,50,1 {_LAYOUT} {_RUN}", settings),
        *("--data-path", *data),
        *_words(_INTERVALS, settings),
    ]
    chunks = int(settings["MODEL_CHUNKS"])
    if chunks > 1:
        per_chunk = int(settings["NUM_LAYERS"]) // int(settings["PIPELINE_PARALLEL"]) // chunks
        words += ["--num-layers-per-virtual-pipeline-stage", str(per_chunk)]
    for name, asked, flags in _OPTIONAL:
        given = settings[name]
        words += _words(flags, settings) if given and asked in (given, _ANY) else []
    return [*words, *to_argv(job.flags())]


def _words(template: str, settings: Variables) -> list[str]:
    """The words of a template, its variables filled in; a value with spaces stays one word."""
    return [word.format_map(settings) for word in template.split()]
