"""``megatron-dpp train``: from a command line to one torchrun per node (docs/USAGE_GUIDE.md)."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.dpp import __version__
from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import (
    BAD_USAGE,
    FAILED,
    INTERRUPTED,
    PROGRAM,
    ConfigError,
    DataError,
    DppError,
    print_error,
)
from megatron.dpp.locks import lock_directory
from megatron.dpp_train.cost import Devices, describe, find_devices, named_devices
from megatron.dpp_train.presets import flag_table, modes, options, recipes, run_directory
from megatron.dpp_train.presets.checks import check
from megatron.dpp_train.presets.console import say
from megatron.dpp_train.presets.flags import PACKAGE, Flags, number, to_argv
from megatron.dpp_train.presets.launch import Command, run
from megatron.dpp_train.presets.nodes import Nodes, find_nodes, meet, whole
from megatron.dpp_train.presets.tokens import Tokens, find_tokens, prepare

PRESET = "--preset"
"""First word of a command line whose settings are those of a launch script."""
_PROCS = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that can be started.

    Args:
        title: how it was asked for.
        lines: about the choice of a layout.
        layers: a few words about the implementation of the layers.
        run_dir: the user's directory for it.
    """

    title: str
    arch: str
    flags: Flags
    devices: Devices
    nodes: Nodes
    tokens: Tokens
    lines: list[str]
    layers: str
    run_dir: str | None
    dry_run: bool
    save_hf: str | None = None

    def command(self) -> list[str]:
        """torchrun and its arguments, the training script and its flags."""
        words = [sys.executable, "-m", "torch.distributed.run"]
        words += self.nodes.torchrun(self.devices.per_node)
        script = ROOT / f"pretrain_{self.arch}.py"
        if not script.is_file():  # an installed package
            words += ["-m", "megatron.dpp.run"]
            script = PACKAGE / "pretrain" / f"{self.arch}.py"
        return [*words, str(script), *to_argv(self.flags)]


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp train") -> int:
    """Resolve, check and run; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(PROGRAM, prog)
    if "--help" in words or "-h" in words:
        print(options.HELP)
        return 0
    if "--version" in words:
        print(f"megatron-dpp {__version__}")
        return 0
    try:
        plan = _of_preset(words[1:]) if words[:1] == [PRESET] else plan_of(words)
        return start(plan)
    except DppError as error:
        print_error(error)
        return BAD_USAGE  # nothing has begun, whatever the reason
    except KeyboardInterrupt:  # while nodes wait for each other, or tokens are made
        return INTERRUPTED
    except BrokenPipeError:  # piped into head: whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def plan_of(words: Sequence[str], env: Mapping[str, str] = os.environ) -> Plan:
    """Resolve a command line of ``train``; nothing is written or started.

    Raises:
        ConfigError: something cannot work.
        DataError: a file is missing.
    """
    given, rest = options.parse(words)
    nodes = find_nodes(env)
    devices = _devices(given, nodes)
    table = flag_table.table()
    flags = modes.base_flags(given, rest, devices)
    tokens = find_tokens(given.arch, given.data, flags, tokenizer=given.tokenizer,
                         skip_bad_lines=given.skip_bad_lines)  # fmt: skip
    flags, lines = modes.add_layout(given, tokens.flags | flags, devices)
    if given.save_hf:
        flags.setdefault("--save", "")
    flags |= _resume(given, flags)
    plan = Plan(
        title=f"train --mode {given.mode}", arch=given.arch, flags=flags, devices=devices,
        nodes=nodes, tokens=tokens, lines=lines, layers="", run_dir=given.run_dir or
        env.get("RUN_DIR") or None, dry_run=given.dry_run or _is_dry(env), save_hf=given.save_hf,
    )  # fmt: skip
    return _checked(plan, table)


def _of_preset(words: Sequence[str]) -> Plan:
    """The run of a launch script: recipe, role, paths and flags."""
    recipe, role, *rest = [*words, "", ""][: max(2, len(words))]
    env = dict(os.environ)
    model = recipe.partition("-")[0]
    paths, further = recipes.take_paths(model, rest) if model in recipes.RECIPES else ({}, [])
    for line in recipes.misspelt(env):
        print(f"warning: {line}", file=sys.stderr)
    machine = find_devices()
    gpus = machine.number if machine.on_gpu else 0
    settings = recipes.settings_of(recipe, role, env | paths, gpus)
    try:
        flags = recipes.flags_of(model, settings, further)
        nodes = find_nodes(settings)
        devices = find_devices(whole("GPUS_PER_NODE", settings), nodes.count)
        tokens = find_tokens(model, None, flags)
        plan = Plan(
            title=Path(os.environ.get(PROGRAM) or recipe).name, arch=model,
            flags=tokens.flags | flags, devices=devices, nodes=nodes, tokens=tokens, lines=[],
            layers="", run_dir=settings.get("RUN_DIR"), dry_run=_is_dry(env),
        )  # fmt: skip
        return _checked(plan, flag_table.table())
    except DppError as error:
        raise type(error)(recipes.in_variables(str(error), settings)) from None


def _is_dry(env: Mapping[str, str]) -> bool:
    return env.get("DRY_RUN", "0") not in ("", "0")


def _checked(plan: Plan, table: flag_table.Table) -> Plan:
    """The plan with this machine's flags, after all checks of its command line."""
    found, layers = modes.platform_flags(plan.flags, plan.arch, plan.devices)
    if plan.nodes.ips:
        found["--node-ips"] = ",".join(plan.nodes.ips)
    plan = replace(plan, flags=found | plan.flags, layers=layers)
    flags = plan.flags
    if plan.tokens.preparation:  # not there yet
        flags = {name: value for name, value in flags.items() if name != "--data-path"}
    check(to_argv(flags), table, world_size=plan.devices.number, also=options.NAMES)
    return plan


def _devices(given: argparse.Namespace, nodes: Nodes) -> Devices:
    """The processes of a run and their devices.

    Raises:
        ConfigError: more GPUs than there are.
    """
    if given.gpu:
        if not (given.dry_run or _is_dry(os.environ)):
            raise ConfigError(f"--gpu {given.gpu}: only a plan can be made for it; add --dry-run")
        per_node = given.gpus or 8
        return named_devices(given.gpu, per_node * nodes.count, per_node=per_node)
    if given.procs:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    machine = find_devices()
    gpus = machine.number if machine.on_gpu else 0
    if given.gpus and given.gpus > gpus:
        nearest = f"--gpus {gpus}" if gpus else f"--procs {given.gpus}"
        raise ConfigError(
            f"--gpus {given.gpus}: this node has {gpus}; use {nearest}, or --dry-run --gpu NAME "
            "for a plan of other GPUs"
        )
    return find_devices(given.gpus or given.procs or gpus or _PROCS, nodes.count)


def _resume(given: argparse.Namespace, flags: Flags) -> Flags:
    """Flags of a run that starts from a checkpoint. A resumed run takes its own learning rate."""
    found: Flags = {}
    if given.resume_from:
        path, step = Path(given.resume_from), None
        name, _, digits = path.name.replace("checkpoint-", "iter_").partition("iter_")
        if digits.isdecimal() and not name:
            path, step = path.parent, int(digits)
        if not (path / "latest_checkpointed_iteration.txt").is_file():
            raise DataError(f"--resume-from {given.resume_from}: no checkpoint is there")
        found = {"--load": str(path), "--exit-on-missing-checkpoint": True,
                 "--override-opt-param-scheduler": True}  # fmt: skip
        found |= {"--ckpt-step": step} if step is not None else {}
        if "--save" not in flags:
            found["--save"] = str(path)
    if "--save" in flags and "--save-interval" not in flags:
        found["--save-interval"] = 1000
    return found


def start(plan: Plan) -> int:
    """Print the plan; then make the tokens, meet the other nodes, and run torchrun to its end."""
    if plan.dry_run:
        _show(plan)
        return 0
    _header(plan)
    flags = plan.flags | ({} if not plan.tokens.preparation else prepare(plan.tokens))
    name = run_directory.name_of(plan.arch, flags, plan.devices.number)
    node = f"-node{plan.nodes.rank}" if plan.nodes.count > 1 else ""
    home = run_directory.make(name + node, plan.run_dir)
    flags |= run_directory.places(flags, home)
    plan = replace(plan, flags=flags)
    log = home / (f"train{node}.log" if plan.run_dir else run_directory.LOG)
    say("run", _relative(home))
    run_directory.write_command(home, plan.command())
    env = _environment(plan) | (meet(plan.nodes, plan.devices.per_node) if node else {})
    save = flags.get("--save")
    with lock_directory(home, "run directory"):
        return run(Command(
            words=plan.command(), env=env, log=log, directory=home,
            metrics=Path(str(flags["--metrics-file"])), save=None if save is None else str(save),
            steps=number(flags, "--train-iters") if "--train-iters" in flags else None,
        ))  # fmt: skip


def _relative(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _header(plan: Plan) -> None:
    """What is about to run, in a few lines."""
    flags, devices = plan.flags, plan.devices
    tensor, pipeline = number(flags, modes.TENSOR), number(flags, modes.PIPELINE)
    chunks = number(flags, modes.CHUNKS)
    replicas = devices.number // (tensor * pipeline * number(flags, "--context-parallel-size"))
    what = [f"TP{tensor}"] * (tensor > 1) + [f"PP{pipeline}"] * (pipeline > 1)
    what += [f"{chunks} chunks"] * (chunks > 1) + [f"DP{replicas}"] * (replicas > 1)
    if pipeline > 1:
        schedule = f", {'dynamic' if '--use-dpp' in flags else 'static'} pipeline"
    else:
        schedule = ""
    where = f"{devices.number} x {devices.device.name}" if devices.on_gpu else (
        f"{devices.number} processes on the CPU")  # fmt: skip
    print(f"MegatronDPP {__version__}: {plan.title}")
    say("model", f"{plan.arch}, {flags.get('--num-layers')} layers of {flags.get('--hidden-size')}, "
                 f"{plan.layers}")  # fmt: skip
    say("layout", f"{' x '.join(what) or 'one replica'}{schedule}, {where}")
    say("batch", f"{flags.get('--global-batch-size')} sequences of {flags.get('--seq-length')} "
                 f"tokens, {flags.get('--micro-batch-size')} at a time")  # fmt: skip
    say("data", plan.tokens.source)
    for line in plan.lines:
        print(line)


def _show(plan: Plan) -> None:
    """A dry run: the header, the estimate, the flags and the command."""
    _header(plan)
    print("\n".join(describe(plan.flags, plan.devices, arch=plan.arch)))
    if plan.tokens.preparation:
        print("\nfirst:", shlex.join([sys.executable, "-m", "megatron.dpp",
                                      *plan.tokens.preparation]))  # fmt: skip
    print(f"\ncommand:\n{shlex.join(plan.command())}")


def _environment(plan: Plan) -> dict[str, str]:
    """The variables of torchrun and its ranks."""
    env = dict(os.environ)
    if (ROOT / "setup.py").is_file():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("PYTHONUNBUFFERED", "1")
    # megatron-core's tensor and context parallelism rely on one hardware queue, FSDP2 on several
    one = number(plan.flags, modes.TENSOR) > 1 or "--context-parallel-size" in plan.flags
    one = one and "--use-torch-fsdp2" not in plan.flags
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1" if one else "8")
    return env


if __name__ == "__main__":
    sys.exit(main())
