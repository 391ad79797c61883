"""``megatron-dpp train``: from command line to torchrun (docs/USAGE_GUIDE.md)."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp import __version__
from megatron.dpp.errors import (
    BAD_USAGE,
    FAILED,
    INTERRUPTED,
    PROGRAM,
    ConfigError,
    DataError,
    DppError,
    print_error,
    use_names,
)
from megatron.dpp.locks import check_free
from megatron.dpp.naming import in_flags, renamed
from megatron.dpp_train.checkpoint.saved_args import check_tokens_kept
from megatron.dpp_train.cost.device import Device, cpu_device, find_machine, named_gpu
from megatron.dpp_train.cost.estimate import Estimate, estimate
from megatron.dpp_train.cost.memory import least_bytes
from megatron.dpp_train.cost.planned import SHAPES
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.text import lines, size
from megatron.dpp_train.launch import auto, cli
from megatron.dpp_train.launch.checked import checked, planned, shape_from
from megatron.dpp_train.launch.flags import Flags, check_known, from_argv, whole_flag
from megatron.dpp_train.launch.job import find_job, is_dry_run, launch, refuse_taken
from megatron.dpp_train.launch.layout import Layout, nearest_multiple
from megatron.dpp_train.launch.nodes import Nodes, find_nodes
from megatron.dpp_train.launch.resolve import (
    Devices,
    Resolved,
    asked_batch,
    asked_layout,
    base_flags,
    forms,
    resolve,
    shard_of,
)
from megatron.dpp_train.launch.start import (
    data_notes,
    describe_tokens,
    find_python,
    prepare,
    require_tokenizer,
    run_preparation,
    show,
    split_of,
)
from megatron.dpp_train.options.environment import check_visible_gpus
from megatron.dpp_train.preflight import check as preflight
from megatron.dpp_train.preflight.files import check_data, check_outputs, check_start

PRESET = "--preset"
"""First word of a command line whose settings are those of a launch script."""
_DEFAULT_PROCS = 2


@use_names(in_flags)
def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp train") -> int:
    """Resolve and start. Returns where nothing is started; else this process becomes torchrun."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(PROGRAM, prog)  # for torchrun and the ranks; launch scripts have set it
    try:
        if "--completion" in words:
            print(cli.completion((words[words.index("--completion") + 1 :] or [""])[0]))
            return 0
        if "--version" in words:
            print(f"megatron-dpp {__version__}")
            return 0
        if "--help" in words or "-h" in words:
            print(cli.help_text(_mode_of(words)))
            return 0
        with use_names(in_flags if _names_run_dir(words) else renamed({"run_dir": "RUN_DIR"})):
            if words[:1] == [PRESET]:
                from megatron.dpp_train.launch import scripts

                scripts.start(words[1:])
            else:
                _start(plan(words), words)
        return 0  # of a dry run
    except DppError as error:
        print_error(error)
        return BAD_USAGE  # nothing has begun, whatever the reason
    except KeyboardInterrupt:  # while nodes wait for each other
        return INTERRUPTED
    except BrokenPipeError:  # piped into head: whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # of a file that this user may not read, say
        print_error(error)
        return BAD_USAGE


@use_names(in_flags)
def refused() -> int:
    """Print what is wrong with the command line, as far as that needs no package; the exit status,
    0 where nothing is."""
    try:
        _, rest = cli.parse(sys.argv[1:])
        check_known(rest, cli.NAMES)
        find_nodes(os.environ)
    except DppError as error:
        print_error(error)
        return BAD_USAGE
    return 0


def _names_run_dir(words: list[str]) -> bool:
    return any(word.partition("=")[0] == "--run-dir" for word in words)


def _mode_of(words: list[str]) -> str | None:
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--mode":
            mode = value or (words[index + 1 : index + 2] or [""])[0]
            cli.check_mode(mode)
            return mode
    return None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A resolved command line and its estimate.

    Args:
        heading: lines about the choice.
        warnings: lines behind the estimate.
        preparation: the command that makes the token files; None where they exist.
        own_split: ``--split`` was not given. It is chosen again when the token files exist.
    """

    options: argparse.Namespace
    resolved: Resolved
    devices: Devices
    nodes: Nodes
    heading: list[str]
    estimate: Estimate
    warnings: list[str]
    preparation: list[str] | None
    own_split: bool


def plan(words: Sequence[str]) -> Plan:
    """Resolve a command line; nothing is written or started.

    Raises:
        ConfigError: something cannot work; names the nearest that can.
        DataError: a file is missing.
    """
    options, rest = cli.parse(words)
    check_known(rest, cli.NAMES)
    if options.config and not Path(options.config).is_file():
        raise DataError(f"--config {options.config}: No such file or directory")
    options.batch_size = asked_batch(options, rest)
    nodes = find_nodes(os.environ)
    if nodes.rank == 0 and not options.dry_run and not is_dry_run():
        _check_free(options, from_argv(rest))
    devices = find_devices(options, nodes)
    flags = base_flags(options, rest, devices)
    data = prepare(
        options.arch or "gpt",
        options.data,
        flags,
        skip_bad_lines=options.skip_bad_lines,
        tokenizer=options.tokenizer,
        build=devices.build_tokenizer,
    )
    require_tokenizer(options.data, flags, options.tokenizer)
    flags |= data.flags
    own_split = not {"--split", "--yaml-cfg"} & set(flags)
    if own_split:
        flags |= split_of(flags if data.preparation is None else {})
    if options.mode == "auto":
        best = _best(options, flags, devices)
        resolved, found = best[0].resolved, best[0].estimate
        heading, warnings = [*auto.report(best[:3], devices), ""], []
    else:
        asked = resolve(
            options,
            flags,
            devices,
            layout=asked_layout(options, flags),
            shard=shard_of(options, devices),
        )
        asked, resolved, found = _fitting(options, asked, flags, devices)
        heading, warnings = [f"mode {options.mode}{_planned(asked)}"], _warnings(found.shape)
    _check_files(resolved, devices, tokens_exist=data.preparation is None)
    heading += resolved.notes
    if data.preparation is None:
        warnings = [*warnings, *data_notes(resolved.flags)]
    return Plan(
        options=options,
        resolved=resolved,
        devices=devices,
        nodes=nodes,
        heading=heading,
        estimate=found,
        warnings=warnings,
        preparation=data.preparation,
        own_split=own_split,
    )


def _check_free(options: argparse.Namespace, flags: Flags) -> None:
    """Refuse directories of other runs that the command line names, before anything takes time; a
    file or a layout may name more of them (DataError)."""
    run_dir = os.environ.get("RUN_DIR")
    named = {"--save": flags.get("--save", options.save), "--run-dir": options.run_dir}
    if not options.run_dir:
        named["RUN_DIR"] = run_dir
    for flag, directory in named.items():
        if directory and directory is not True:
            check_free(directory, flag)


def _fitting(
    options: argparse.Namespace, asked: Resolved, flags: Flags, devices: Devices
) -> tuple[Resolved, Resolved, Estimate]:
    """The fastest form of a run that fits: as asked for, with its layers planned, and its estimate.
    Where none does, a ConfigError names the nearest."""
    memory, fitting, needs = devices.device.memory_bytes, [], []
    for form in forms(asked, devices):
        try:
            needs.append(least_bytes(shape_from(form, devices, plan=False)))
        except ConfigError:
            if form is asked:
                raise
            continue  # what was asked for may run, in no other form
        if needs[-1] <= memory:
            resolved = planned(form, devices)
            found = estimate(shape_from(resolved, devices), devices.device)
            needs[-1] = found.peak_bytes
            if needs[-1] <= memory:
                fitting.append((form, resolved, found))
    if not fitting:
        raise _does_not_fit(options, min(needs), flags, devices)
    return min(fitting, key=lambda each: each[2].seconds)


def _planned(asked: Resolved) -> str:
    """A note where ranks have different numbers of layers."""
    plan = asked.flags.get("--dpp-plan")
    if plan == SHAPES:
        return ", layers laid out by what they cost (--chunks N: as many on every stage)"
    return f", layers laid out by what they took in {plan}" if plan else ""


def _start(found: Plan, words: Sequence[str]) -> None:
    """Set up, preprocess, and become torchrun. With another Python than this one, do all of it
    again there: what it has installed decides what a run can do."""
    options, resolved = found.options, found.resolved
    sizes = {"GPUS_PER_NODE": str(found.devices.per_node), **found.nodes.environment()}
    job = find_job({**os.environ, **sizes})
    if options.run_dir:
        os.environ["RUN_DIR"] = options.run_dir
    os.environ["DPP_GO_ON"] = shlex.join(["megatron-dpp", "train", *words, "--resume-from"])
    if not options.dry_run:
        refuse_taken(job, resolved.parsed)
        if options.procs is None:
            check_visible_gpus(os.environ)
    python = find_python(words, dry_run=options.dry_run)
    # The run that follows says it itself, unless a preparation keeps it waiting.
    says_itself = "--estimate" in resolved.flags and not (options.dry_run or found.preparation)
    needs = [] if says_itself else lines(found.estimate)
    print("\n".join([*found.heading, *needs, *found.warnings]), flush=True)
    if found.preparation:
        preparation = [python, *found.preparation]
        if options.dry_run:
            print("\nfirst:", shlex.join(preparation))
        else:
            run_preparation(preparation)
            if found.own_split:
                resolved.give(split_of(resolved.flags))
            tokens = [describe_tokens(resolved.flags), *data_notes(resolved.flags)]
            print("\n".join(tokens), flush=True)
    script = f"pretrain_{resolved.arch}.py"
    print(f"\nflags of {script}:\n{show(resolved.argv)}\n", flush=True)
    if not found.devices.on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    resolved.give(job.flags())
    launch(job, python, script, resolved.argv, resolved.parsed, dry_run=options.dry_run)


def find_devices(options: argparse.Namespace, nodes: Nodes) -> Devices:
    """Devices and their number.

    Raises:
        ConfigError: more GPUs than there are.
    """
    if options.procs is not None:
        device = cpu_device(options.procs)
        return _devices(options, nodes, per_node=options.procs, on_gpu=False, device=device)
    named = named_gpu(options.gpu, options.tflops, options.memory, options.bandwidth)
    if named is not None and (options.dry_run or options.gpu):
        return _imagined(options, nodes, named)
    machine = find_machine(_DEFAULT_PROCS)
    asked = options.gpus
    if asked is not None and asked > machine.num_gpus:
        nearest = f"--gpus {machine.num_gpus}" if machine.num_gpus else f"--procs {asked}"
        raise ConfigError(
            f"--gpus {asked}: this node has {machine.num_gpus}; nearest possible: {nearest}, or "
            f"--dry-run --gpu NAME for what {asked} of another machine would do"
        )
    on_gpu = machine.num_gpus > 0
    per_node = options.gpus or machine.num_gpus or _DEFAULT_PROCS
    return _devices(options, nodes, per_node=per_node, on_gpu=on_gpu, device=machine.device)


def _imagined(options: argparse.Namespace, nodes: Nodes, device: Device) -> Devices:
    """GPUs that this machine need not have, for a dry run."""
    if not options.dry_run:
        raise ConfigError(f"--gpu {options.gpu}: only a plan can be made for it; add --dry-run")
    per_node = options.gpus or 8
    return _devices(options, nodes, per_node=per_node, on_gpu=True, device=device, elsewhere=True)


def _devices(options: argparse.Namespace, nodes: Nodes, **found: object) -> Devices:
    devices = Devices(num_nodes=nodes.count, **found)  # type: ignore[arg-type]
    figures = options.tflops, options.memory, options.bandwidth
    return dataclasses.replace(devices, device=devices.device.with_figures(*figures))


def _check_files(resolved: Resolved, devices: Devices, *, tokens_exist: bool) -> None:
    """Check checkpoint, outputs and data before text is tokenised, which may take hours."""
    args = checked(resolved, devices)
    check_start(args)
    check_tokens_kept(*preflight.build_vocabulary(args, devices.build_tokenizer))
    check_outputs(args)
    if tokens_exist:
        check_data(args, resolved.arch)


def _warnings(shape: RunShape) -> list[str]:
    """Options that cannot take effect."""
    if shape.shard == "none" or shape.data * shape.context > 1:
        return []
    return ["warning: there is one replica, so --mode zero shards nothing; nearest: --mode 3d"]


def plain_shape(options: argparse.Namespace, flags: Flags, devices: Devices) -> RunShape:
    """The run on one device, which ``auto`` starts from. A batch that was not asked for is made to
    fit as many replicas as there are devices."""
    plain = argparse.Namespace(**vars(options))
    plain.mode = "simple"
    batch = whole_flag(flags, "--global-batch-size")
    if options.batch_size is None and batch % devices.world_size:
        batch = nearest_multiple(batch, devices.world_size)
    alone = dataclasses.replace(devices, per_node=1, num_nodes=1)
    flags = {**flags, "--global-batch-size": batch, "--micro-batch-size": 1}
    flags.pop("--dpp-inject", None)  # it may name ranks of a pipeline
    return shape_from(resolve(plain, flags, alone, layout=Layout(), shard="none"), alone)


def _does_not_fit(
    options: argparse.Namespace, need_bytes: float, flags: Flags, devices: Devices
) -> ConfigError:
    need = f"the fullest rank needs {size(need_bytes)} of {size(devices.device.memory_bytes)}"
    if options.mode == "megatron":  # its file holds the batch, and the layout
        return ConfigError(f"{need}; more devices, or a layout in --config, divide the model")
    plain = plain_shape(options, flags, devices)
    fitting = auto.candidates(options, flags, devices, plain)
    if fitting:
        return ConfigError(f"{need}; nearest that fits: {fitting[0].command()}")
    return ConfigError(f"{need}; {auto.why_nothing_fits(options, flags, devices, plain)}")


def _best(options: argparse.Namespace, flags: Flags, devices: Devices) -> list[auto.Candidate]:
    """Mode ``auto``: all layouts that fit, the best first."""
    plain = plain_shape(options, flags, devices)
    found = auto.candidates(options, flags, devices, plain)
    if not found:
        raise ConfigError(auto.why_nothing_fits(options, flags, devices, plain))
    return found
