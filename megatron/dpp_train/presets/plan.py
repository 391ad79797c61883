"""A run that can be started, from a command line of ``train`` or a launch script's settings."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import PROGRAM, ConfigError, DataError, DppError
from megatron.dpp_train.cost import Devices, find_devices, named_devices
from megatron.dpp_train.presets import flag_table, modes, options, recipes
from megatron.dpp_train.presets.checks import check, parse
from megatron.dpp_train.presets.flags import Flags, number, to_argv
from megatron.dpp_train.presets.nodes import Nodes, find_nodes
from megatron.dpp_train.presets.tokens import Tokens, find_tokens

TRACKER = "latest_checkpointed_iteration.txt"
_PROCS = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that can be started.

    Args:
        title: how it was asked for.
        lines: about the choice of a layout.
        layers: a few words about the implementation of the layers.
        run_dir: the user's directory for it.
        load_hf: Hugging Face folder that it starts from.
        save_hf: folder for the trained model in Hugging Face's form.
        static: megatron-core's schedule was asked for, whatever ``USE_DPP`` says.
    """

    title: str
    arch: str
    flags: Flags
    devices: Devices
    nodes: Nodes
    tokens: Tokens
    dry_run: bool
    run_dir: str | None = None
    lines: tuple[str, ...] = ()
    layers: str = ""
    load_hf: str | None = None
    save_hf: str | None = None
    static: bool = False

    def command(self) -> list[str]:
        """torchrun and its arguments, the training script and its flags."""
        words = [sys.executable, "-m", "torch.distributed.run"]
        words += self.nodes.torchrun(self.devices.per_node)
        script = ROOT / f"pretrain_{self.arch}.py"
        by_deepspeed = "--deepspeed-zero-stage" in self.flags
        if by_deepspeed or not script.is_file():  # the latter in an installed package
            words += ["-m", "megatron.dpp.run"]
            inside = "deepspeed.py" if by_deepspeed else f"pretrain/{self.arch}.py"
            script = flag_table.PACKAGE / inside
        return [*words, str(script), *to_argv(self.flags)]

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return modes.replicas_of(self.flags, self.devices)


def of_options(words: Sequence[str], env: Mapping[str, str]) -> Plan:
    """Resolve a command line of ``train``; nothing is written or started.

    Raises:
        ConfigError: something cannot work.
        DataError: a file is missing.
    """
    given, rest = options.parse(words)
    parse(to_argv(rest), flag_table.table(), options.NAMES)
    nodes = find_nodes(env)
    dry_run = given.dry_run or is_dry(env)
    devices = _devices(given, nodes, dry_run=dry_run)
    flags = modes.base_flags(given, rest, devices)
    tokenizer = given.tokenizer
    if given.load_hf and not (tokenizer or {"--tokenizer-type", "--vocab-file"} & set(rest)):
        tokenizer = given.load_hf
    tokens = find_tokens(
        given.arch, given.data, flags, tokenizer=tokenizer, skip_bad_lines=given.skip_bad_lines
    )
    flags |= {name: value for name, value in tokens.flags.items() if name not in given.given}
    if flags.pop("--sft", None):  # chats are documents whose answers alone have a loss
        flags.setdefault("--rows", "as-they-are")
    flags, lines = modes.add_layout(given, flags, devices)
    plan = Plan(
        title=f"train --mode {given.mode}",
        arch=given.arch,
        flags=flags | _checkpoints(given, flags),
        devices=devices,
        nodes=nodes,
        tokens=tokens,
        dry_run=dry_run,
        run_dir=given.run_dir or env.get("RUN_DIR") or None,
        lines=tuple(lines),
        load_hf=given.load_hf,
        save_hf=given.save_hf,
        static=given.no_dpp,
    )
    return _checked(plan, elsewhere=given.gpu is not None)


def of_recipe(words: Sequence[str], env: Mapping[str, str]) -> Plan:
    """Resolve a launch script's ``RECIPE ROLE [PATHS] [FLAGS]``; its errors name variables.

    Raises:
        ConfigError, DataError: as :func:`of_options`.
    """
    recipe, role = [*words, "", ""][:2]
    model = recipe.partition("-")[0]
    paths, further = recipes.take_paths(model, words[2:])
    for line in recipes.misspelt(env):
        print(f"warning: {line}", file=sys.stderr)
    machine = find_devices()
    gpus = machine.number if machine.on_gpu else 0
    settings = recipes.settings_of(recipe, role, {**env, **paths}, gpus)
    try:
        flags = recipes.flags_of(model, settings, further)
        nodes = find_nodes(settings)
        tokens = find_tokens(model, None, flags)
        plan = Plan(
            title=Path(env.get(PROGRAM) or recipe).name,
            arch=model,
            flags=tokens.flags | flags,
            devices=find_devices(number(settings, "GPUS_PER_NODE"), nodes.count),
            nodes=nodes,
            tokens=tokens,
            dry_run=is_dry(env),
            run_dir=settings.get("RUN_DIR"),
        )
        return _checked(plan)
    except DppError as error:
        raise type(error)(recipes.in_variables(str(error), settings)) from None


def is_dry(env: Mapping[str, str]) -> bool:
    """True where ``DRY_RUN`` asks for the command only."""
    return env.get("DRY_RUN", "0") not in ("", "0")


def _checked(plan: Plan, *, elsewhere: bool = False) -> Plan:
    """The plan with this machine's flags, after all checks of its command line."""
    found, layers = modes.platform_flags(plan.flags, plan.arch, plan.devices, elsewhere=elsewhere)
    if plan.nodes.ips:
        found["--node-ips"] = ",".join(plan.nodes.ips)
    plan = replace(plan, flags=found | plan.flags, layers=layers)
    unmade = "--data-path" if plan.tokens.preparation else None
    flags = {name: value for name, value in plan.flags.items() if name != unmade}
    table, ranks = flag_table.table(), plan.devices.number
    check(to_argv(flags), table, world_size=ranks, also=options.NAMES)
    return plan


def _devices(given: argparse.Namespace, nodes: Nodes, *, dry_run: bool) -> Devices:
    """The processes of a run and their devices.

    Raises:
        ConfigError: more GPUs than there are.
    """
    if given.gpu:
        if not dry_run:
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


def _checkpoints(given: argparse.Namespace, flags: Flags) -> Flags:
    """Flags of checkpoints. A resumed run takes the learning rate that it is given."""
    found: Flags = {}
    if given.resume_from:
        path, step = Path(given.resume_from), None
        name, _, digits = path.name.replace("checkpoint-", "iter_").partition("iter_")
        if digits.isdecimal() and not name:
            path, step = path.parent, int(digits)
        if not (path / TRACKER).is_file():
            raise DataError(f"--resume-from {given.resume_from}: no checkpoint is there")
        found = {"--load": str(path), "--exit-on-missing-checkpoint": True}
        found |= {"--override-opt-param-scheduler": True, "--save": flags.get("--save", str(path))}
        found |= {"--ckpt-step": step} if step is not None else {}
    if "--save" in flags | found or given.save_hf:
        found.setdefault("--save-interval", flags.get("--save-interval", 1000))
    return found
