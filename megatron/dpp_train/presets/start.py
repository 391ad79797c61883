"""From a plan to its end: what a run prints, prepares and starts."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from megatron.dpp import __version__
from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import DataError
from megatron.dpp.files.locks import lock_directory
from megatron.dpp.processes import run_child
from megatron.dpp_train.cost import describe
from megatron.dpp_train.presets import options, run_directory
from megatron.dpp_train.presets.flags import Flags, number
from megatron.dpp_train.presets.launch import Command, run
from megatron.dpp_train.presets.nodes import meet
from megatron.dpp_train.presets.plan import Plan
from megatron.dpp_train.presets.tokens import prepare


def start(plan: Plan) -> int:
    """Print the plan; then make the tokens, meet the other nodes, and run torchrun to its end."""
    header(plan)
    if plan.dry_run:
        print("\n".join(describe(plan.flags, plan.devices, arch=plan.arch)))
        if plan.tokens.preparation:
            words = [sys.executable, "-m", "megatron.dpp", *plan.tokens.preparation]
            print(f"\nfirst:\n{shlex.join(words)}")
        print(f"\ncommand:\n{shlex.join(plan.command())}")
        return 0
    made = prepare(plan.tokens)
    asked = {
        name for name, value in made.items() if plan.flags.get(name) != plan.tokens.flags.get(name)
    }
    flags = plan.flags | {name: value for name, value in made.items() if name not in asked}
    name = run_directory.name_of(plan.arch, flags, plan.replicas)
    node = f"-node{plan.nodes.rank}" if plan.nodes.count > 1 else ""
    home = run_directory.make(name + node, plan.run_dir, goes_on="--load" in flags)
    say("run", os.path.relpath(home) if home.is_relative_to(Path.cwd()) else home)
    with contextlib.nullcontext() if plan.nodes.rank else lock_directory(home, "run directory"):
        return _run_in(home, plan, flags, node)  # further nodes may share the directory


def _run_in(home: Path, plan: Plan, flags: Flags, node: str) -> int:
    """Run a plan in its directory, to its end; ``node`` ends names of this node's files."""
    flags |= run_directory.places(flags, home, saves=plan.save_hf is not None)
    if plan.load_hf:
        _convert(plan.load_hf, home / "start")
        flags |= {"--load": str(home / "start"), "--finetune": True}
    plan = replace(plan, flags=flags)
    run_directory.write_command(home, plan.command())
    env = environment(plan) | (meet(plan.nodes, plan.devices.per_node) if node else {})
    log = home / f"train{node if plan.run_dir else ''}.log"
    code = run(Command(words=plan.command(), env=env, directory=home, flags=flags, log=log))
    if code == 0 and plan.save_hf and plan.nodes.rank == 0:
        like = ["--like", plan.load_hf] if plan.load_hf else []
        _convert(str(flags["--save"]), Path(plan.save_hf), *like)
        print(f"model    {plan.save_hf}")
    return code


def _convert(source: str, target: Path, *words: str) -> None:
    command = [sys.executable, "-m", "megatron.dpp", "convert", source, str(target), *words]
    if run_child(command, stdout=subprocess.DEVNULL):
        raise DataError(f"{source} could not be converted: see above")


def header(plan: Plan) -> None:
    """Prints a few lines about the run that is about to start."""
    flags, devices = plan.flags, plan.devices
    chunks, pipeline = number(flags, options.CHUNKS), number(flags, options.PIPELINE)
    sizes = {
        "TP": number(flags, options.TENSOR),
        "PP": pipeline,
        "CP": number(flags, "--context-parallel-size"),
        "DP": plan.replicas,
    }
    what = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    what += [f"{chunks} chunks"] * (chunks > 1)
    layout = " x ".join(what) or "one replica"
    if pipeline > 1:
        layout += f", {'dynamic' if '--use-dpp' in flags else 'static'} pipeline"
    kind = f"x {devices.device.name}" if devices.on_gpu else "processes on the CPU"
    print(f"MegatronDPP {__version__}: {plan.title}")
    model = f"{flags.get('--num-layers')} layers of {flags.get('--hidden-size')}"
    say("model", f"{plan.arch}, {model}, {plan.layers}")
    say("layout", f"{layout}, {devices.number} {kind}")
    say(
        "batch",
        f"{flags.get('--global-batch-size')} sequences of {flags.get('--seq-length')} "
        f"tokens, {flags.get('--micro-batch-size')} at a time",
    )
    say("data", plan.tokens.source)
    print(*plan.lines, sep="\n", end="\n" if plan.lines else "", flush=True)


def say(name: str, text: object) -> None:
    """A line of the header."""
    print(f"{name:<8} {text}", flush=True)


def environment(plan: Plan) -> dict[str, str]:
    """The variables of torchrun and its ranks."""
    env = dict(os.environ)
    if (ROOT / "setup.py").is_file():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    # megatron-core's tensor and context parallelism rely on one hardware queue, FSDP2 on several
    one = number(plan.flags, options.TENSOR) > 1 or "--context-parallel-size" in plan.flags
    one = one and "--use-torch-fsdp2" not in plan.flags
    defaults = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if one else "8",
    }
    return defaults | env
