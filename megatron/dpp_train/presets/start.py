"""From a plan to its end: what a run prints, prepares, starts and keeps.

Each run has a directory, ``runs/DATE-MODEL-LAYOUT``, with its log, metrics, traces and state;
``runs/latest`` links to the newest. ``RUN_DIR`` (``train``: ``--run-dir``) names another.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from megatron.dpp import __version__
from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import DataError
from megatron.dpp.files.locks import lock_directory
from megatron.dpp.processes import run_child
from megatron.dpp.report.run_files import COMMAND, METRICS
from megatron.dpp_train.cost import describe
from megatron.dpp_train.presets.flags import Flags, number
from megatron.dpp_train.presets.launch import run
from megatron.dpp_train.presets.nodes import meet
from megatron.dpp_train.presets.options import CHUNKS, CONTEXT, PIPELINE, TENSOR
from megatron.dpp_train.presets.plan import Plan
from megatron.dpp_train.presets.tokens import prepare


def start(plan: Plan) -> int:
    """Print the plan; then make the tokens, meet the other nodes, and run torchrun to its end."""
    _print_header(plan)
    if plan.dry_run:
        print("\n".join(describe(plan.flags, plan.devices, arch=plan.arch)))
        if plan.tokens.preparation:
            words = [sys.executable, "-m", "megatron.dpp", *plan.tokens.preparation]
            print(f"\nfirst:\n{shlex.join(words)}")
        print(f"\ncommand:\n{shlex.join(plan.command())}")
        return 0
    guessed = plan.tokens.flags  # a flag that has another value was asked for
    made = {n: v for n, v in prepare(plan.tokens).items() if plan.flags.get(n) == guessed.get(n)}
    flags = plan.flags | made
    node = f"-node{plan.nodes.rank}" if plan.nodes.count > 1 else ""
    home = _make_directory(plan, node)
    _say("run", os.path.relpath(home) if home.is_relative_to(Path.cwd()) else home)
    with contextlib.nullcontext() if plan.nodes.rank else lock_directory(home, "run directory"):
        return _run_in(home, plan, flags, node)  # further nodes may share the directory


def _run_in(home: Path, plan: Plan, flags: Flags, node: str) -> int:
    """Run a plan in its directory, to its end; ``node`` ends names of this node's files."""
    flags |= _places(flags, home, saves=plan.save_hf is not None)
    if plan.load_hf:
        _convert(plan.load_hf, home / "start")
        flags |= {"--load": str(home / "start"), "--finetune": True}
    plan = replace(plan, flags=flags)
    command = plan.command()
    (home / COMMAND).write_bytes(os.fsencode(shlex.join(command) + "\n"))
    env = environment(plan) | (meet(plan.nodes, plan.devices.per_node) if node else {})
    log = home / f"train{node if plan.run_dir else ''}.log"
    code = run(command, env, home, log, flags)
    if code == 0 and plan.save_hf and plan.nodes.rank == 0:
        like = ["--like", plan.load_hf] if plan.load_hf else []
        _convert(str(flags["--save"]), Path(plan.save_hf), *like)
        print(f"model    {plan.save_hf}")
    return code


def _convert(source: str, target: Path, *words: str) -> None:
    command = [sys.executable, "-m", "megatron.dpp", "convert", source, str(target), *words]
    if run_child(command, stdout=subprocess.DEVNULL):
        raise DataError(f"{source} could not be converted: see above")


def _print_header(plan: Plan) -> None:
    """A few lines about the run that is about to start."""
    flags, devices = plan.flags, plan.devices
    chunks, pipeline = number(flags, CHUNKS), number(flags, PIPELINE)
    sizes = {"TP": number(flags, TENSOR), "PP": pipeline, "CP": number(flags, CONTEXT)}
    sizes["DP"] = plan.replicas
    what = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    what += [f"{chunks} chunks"] * (chunks > 1)
    layout = " x ".join(what) or "one replica"
    if pipeline > 1:
        layout += f", {'dynamic' if '--use-dpp' in flags else 'static'} pipeline"
    kind = f"x {devices.device.name}" if devices.on_gpu else "processes on the CPU"
    model = f"{flags.get('--num-layers')} layers of {flags.get('--hidden-size')}"
    batch = f"{flags.get('--global-batch-size')} sequences of {flags.get('--seq-length')} tokens"
    print(f"MegatronDPP {__version__}: {plan.title}")
    _say("model", f"{plan.arch}, {model}, {plan.layers}")
    _say("layout", f"{layout}, {devices.number} {kind}")
    _say("batch", f"{batch}, {flags.get('--micro-batch-size')} at a time")
    _say("data", plan.tokens.source)
    print(*plan.lines, sep="\n", end="\n" if plan.lines else "", flush=True)


def _say(name: str, text: object) -> None:
    print(f"{name:<8} {text}", flush=True)


def _make_directory(plan: Plan, node: str) -> Path:
    """Make the directory of a run that starts now: the user's, or a new one below ``runs``.

    Raises:
        DataError: it cannot be made, or an earlier run's files are in it and this one does not
            begin with a checkpoint.
    """
    flags, runs = plan.flags, Path("runs").absolute()
    try:
        if plan.run_dir:
            path = Path(plan.run_dir).absolute()
            path.mkdir(parents=True, exist_ok=True)
            if (path / METRICS).exists() and "--load" not in flags:
                said = f"{METRICS} of an earlier run is there; name another directory for this run"
                raise DataError(f"{plan.run_dir}: {said}")
            return path
        chunks = f"-v{flags[CHUNKS]}" if CHUNKS in flags else ""
        name = f"{plan.arch}-{flags.get('--num-layers')}x{flags.get('--hidden-size')}"
        name += f"-tp{number(flags, TENSOR)}-pp{number(flags, PIPELINE)}{chunks}-dp{plan.replicas}"
        runs.mkdir(parents=True, exist_ok=True)
        path = _new_directory(runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}{node}")
        scratch = path.with_name(f".latest-{os.getpid()}")
        scratch.symlink_to(path.name)
        scratch.replace(path.with_name("latest"))
        return path
    except OSError as error:
        rule = "name a directory for this run with --run-dir or RUN_DIR"
        raise DataError(f"{plan.run_dir or runs}: {error.strerror}; {rule}") from error


def _new_directory(path: Path) -> Path:
    """``path``, or one with further letters where another run of this second has it."""
    try:
        path.mkdir()
        return path
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))


def _places(flags: Flags, home: Path, *, saves: bool) -> Flags:
    """Flags that put a run's files into its directory, where the run names no other place."""
    found: Flags = {}
    if "--metrics-file" not in flags:
        found["--metrics-file"] = str(home / METRICS)
    if {"--dpp-trace", "--dpp-trace-only"} & {*flags} and "--dpp-trace-dir" not in flags:
        found["--dpp-trace-dir"] = str(home / "traces")
    steps, every = flags.get("--train-iters"), flags.get("--save-interval")
    saves = saves or bool(every and steps and int(every) <= int(steps))
    if saves and "--save" not in flags:
        found["--save"] = str(home / "checkpoints")
    return found


def environment(plan: Plan) -> dict[str, str]:
    """The variables of torchrun and its ranks."""
    env = dict(os.environ)
    if (ROOT / "setup.py").is_file():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    # megatron-core's tensor and context parallelism rely on one hardware queue, FSDP2 on several
    one = number(plan.flags, TENSOR) > 1 or CONTEXT in plan.flags
    one = one and "--use-torch-fsdp2" not in plan.flags
    defaults = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if one else "8",
    }
    return defaults | env | ({"USE_DPP": "0"} if plan.static else {})
