"""Steps of an unmodified Megatron-LM under its own schedule and under the plug-in's, in turns.

    python profiling/bench_plugin.py --sources DIR [--json FILE]
    python profiling/bench_plugin.py --sources DIR --layers-of transformer_engine --queues 1,8 \\
        --arms static,static-graphs,static-links,megatron,fused,dynamic --more "--swiglu"
    python profiling/bench_plugin.py --sources DIR --cases lengths,long,fp8,one-queue

DIR holds archives ``NAME.tar.xz`` of Megatron-LM, or folders NAME. Rows: sequences of one length;
of unlike length, one a microbatch; the same padded to geometric length buckets, for each of which
dynamic arms may capture CUDA graphs; and unlike lengths packed into rows of at most --sequence
tokens (best fit; attention ends at a sequence's end with --documents alone).

The arms of a row train the same model on the same microbatches within one process group, in turns
of ``--block`` steps; the learning rate is 0, so all steps have the same loss. Arms with the host's
own CUDA graphs, and each number of hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``), are process
groups of their own, and with ``--alone`` all arms are. Memory is the most that the worst rank
reserved in an arm's turns.

Not timed are the first ``--untimed`` steps of a turn, and its steps up to the last in which a rank
captured a CUDA graph. SIGTERM, SIGINT and ``--seconds`` end a process group: the steps recorded so
far are reported and written, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import arms
import harness
import megatron_sources
import plugin_group
from plugin_group import Line

from megatron.dpp.config import DppConfig

LAYERS = {
    "local": "--transformer-impl local --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-persist-layer-norm",
    "transformer_engine": "--transformer-impl transformer_engine",
}
"""Whose layers -> their flags."""
FUSED = (False, "with --gradient-accumulation-fusion, whose kernel is PyTorch's without Apex")
ROWS = ("equal", "unlike", "bucketed", "packed")
_DEFAULT = {"policy": "auto", "split_backward": "auto", "activation_cap": "auto"}
OTHERS: dict[str, dict[str, Any]] = {
    "auto-": {"split_backward": "auto"},
    "default-": _DEFAULT,
    "eagerdefault-": {"cuda_graphs": "off", **_DEFAULT},
    "fused-": {"split_backward": "off"},
    "stock0-": {"split_backward": "stock:0"},
    "stock1-": {"split_backward": "stock:1"},
    "eager-": {"cuda_graphs": "off"},
    "eagerauto-": {"cuda_graphs": "off", "split_backward": "auto"},
}
"""Prefix of a dynamic arm -> what it changes: a backward is split as measured, not at all, or
unless N others wait for their weight gradients; all is as by default; without our CUDA graphs."""
COMMAND = "command"
"""The arm of the command that a user types: the script with ``--use-dpp``, all else by default."""
_PADDED = "padded-"
"""Beginning of the name of a static arm whose rows are padded to the longest."""
_SLICED = re.compile(r"^s([1-9][0-9]*)-")
"""Beginning of the name of a dynamic arm that cuts sequences, and the tokens of a slice."""
NAMES = {name.replace(", ", "-").replace(" ", "-"): name for name in arms.ARMS}
"""Name on the command line -> name of the arm."""
_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --cross-entropy-loss-fusion --ffn-hidden-size 14336 "
    "--group-query-attention --num-query-groups 8"
)
_OF_LLAMA = ("--layers-of", "transformer_engine", "--block", "7", "--untimed", "4",
             "--vocabulary", "128255", "--layout", "Ettt|tt|tt|tL", "--more", _LLAMA)  # fmt: skip
_BUCKETS = "geometric"
_SHORT = "static,static-links,megatron,fused,dynamic"
_ALONE = ("--layers-of", "transformer_engine", "--alone", "--rounds", "3", "--block", "24")
"""A process group per arm; the race of whole steps is in the first turn, which is not timed."""
_OWN_BEST = f"static,static-graphs,{COMMAND}"
_345M = ("--rows", "equal", "--hidden", "1024", "--heads", "16", "--layers", "24", "--sequence",
         "1024", "--more=--cross-entropy-loss-fusion", "--arms", _OWN_BEST)  # fmt: skip
_UNLIKE = ("--rows", "unlike", "--seed", "5", "--arms",
           f"{_PADDED}static,{_PADDED}static-graphs,static,{COMMAND}")  # fmt: skip
_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
_EXPERTS = (
    f"{_LLAMA.replace('14336', '1024')} --num-experts 64 --moe-router-topk 8 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2"
)
_COMMANDS: dict[str, tuple[str, ...]] = {
    "equal": ("--rows", "equal", "--arms", _OWN_BEST),
    "unlike": _UNLIKE,
    "packed": ("--rows", "packed", "--documents", "--arms", f"static,{COMMAND}"),
    "fp8": (*_UNLIKE, "--more", _FP8),
    "345m": (*_345M, "--micro-batch", "4"),
    "345m-one-row": _345M,
    "experts": (
        "--rows", "equal", "--hidden", "2048", "--heads", "16", "--more", _EXPERTS,
        "--own-graphs", "--cuda-graph-impl transformer_engine --te-rng-tracker "
        "--cuda-graph-modules attn moe_router moe_preprocess", "--arms", _OWN_BEST,
    ),
    "whole-iteration": (
        "--rows", "equal", "--own-graphs",
        "--cuda-graph-impl full_iteration --te-rng-tracker --no-check-for-nan-in-loss-and-grad",
        "--arms", "static-graphs",
    ),
}  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {
    "lengths": (
        *_OF_LLAMA, "--rows", "equal,unlike,packed", "--arms",
        "static,static-links,eager-megatron,megatron,fused,dynamic-cap-static,dynamic",
    ),
    "long": (
        *_OF_LLAMA, "--rows", "equal,unlike", "--sequence", "16384", "--median", "4096",
        "--microbatches", "8", "--arms", _SHORT,
    ),
    "fp8": (
        *_OF_LLAMA[:-1], f"{_LLAMA} --fp8-format hybrid --fp8-recipe tensorwise", "--rows",
        "equal,unlike", "--arms",
        "static,static-graphs,static-links,eager-megatron,megatron,fused,dynamic",
    ),
    "one-queue": (
        *_OF_LLAMA, "--rows", "equal,unlike", "--queues", "1,8", "--runs", "3", "--arms", _SHORT,
        "--one-queue", _SHORT,
    ),
    "launch-bound": (
        "--layers-of", "transformer_engine", "--block", "9", "--untimed", "6", "--rows", "equal",
        "--vocabulary", "50303", "--hidden", "1024", "--heads", "16", "--layers", "24",
        "--sequence", "1024", "--more=--cross-entropy-loss-fusion", "--arms",
        "static,static-graphs,static-links,eager-megatron,megatron,eager-dynamic,dynamic",
    ),
    **{f"command-{name}": (*_ALONE, *words) for name, words in _COMMANDS.items()},
}  # fmt: skip
"""Name of a table -> its options, which those of the command line follow. ``eager-megatron`` is
Megatron's order with a split backward without CUDA graphs: it separates W from graphs."""
_OWN_GRAPHS = (arms.GRAPHS, arms.GRAPHS_LINKS)


def main() -> int:
    """Measure and print the tables; 1 if a process group did not end by itself."""
    steps: dict[str, list[Line]] = {}
    failed: dict[str, str] = {}
    with harness.Stop() as stop:
        for args in parse_cases(sys.argv[1:]):
            if args.cases and not stop.reason:
                print(f"\ncase {args.cases}: {' '.join(CASES[args.cases])}", flush=True)
            measure(args, steps, failed, stop)
    for group, reason in failed.items():
        print(f"not whole: {group}: {reason}")
    return int(bool(failed) or bool(stop.reason))


def measure(
    args: argparse.Namespace,
    steps: dict[str, list[Line]],
    failed: dict[str, str],
    stop: harness.Stop,
) -> None:
    """Measure and print the tables of one command line, until ``stop``.

    Args:
        steps: gets the lines of each process group.
        failed: gets the reason of each group that did not end by itself.
    """  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for version, row in itertools.product(args.versions, args.rows):
            if stop.reason:
                return
            root = unpacked(args, version, Path(folder))
            print(f"{version}, {row}", flush=True)
            groups = [*process_groups(args, row)]
            ran = run_groups(args, root, row, groups, stop)
            for (queues, names), (lines, reason) in zip(groups, ran, strict=True):
                case = f"{args.cases} " if args.cases else ""
                group = f"{case}{version} {row} {queues} {names[0]}"
                steps[group] = lines
                if reason:
                    failed[group] = reason
            facts = {"settings": vars(args), "steps": steps, "failed": failed}
            harness.write_json(args.json, facts)
            found = [(queues, lines) for (queues, _), (lines, _) in zip(groups, ran, strict=True)]
            report(args, f"{version}, {row}", found)


def run_groups(
    args: argparse.Namespace,
    root: Path,
    row: str,
    groups: Sequence[tuple[str, list[str]]],
    stop: harness.Stop,
) -> list[tuple[list[Line], str]]:
    """Run a row's process groups, one after the other; with ``--alone`` all are started, and take
    turns. The lines of each, and the reason why it did not end by itself.
    """
    beside = len(groups) if args.alone else 1
    with tempfile.TemporaryDirectory() as turns, ThreadPoolExecutor(beside) as pool:

        def run(place: int, queues: str, names: list[str]) -> tuple[list[Line], str]:
            if stop.reason:
                return [], stop.reason
            print(f"{row}, {queues} queues: {' '.join(names)}", flush=True)
            padded, documents = names[0].startswith(_PADDED), args.documents and row == "packed"
            ran = plugin_group.run(
                root, [*flags(args), *own_flags(args, names[0])],
                [arm_of(name, row) for name in names], processes=args.ranks, queues=queues,
                block=args.block, rounds=args.rounds, microbatches=args.microbatches,
                lengths=[] if padded else lengths(args, row), stop=stop,
                documents=rows_of(args, padded) if documents else (),
                seconds=args.seconds * beside, turn=(turns, place % beside, beside),
            )  # fmt: skip
            for turn in range(args.rounds if args.alone else 0):  # those that it has not ended
                Path(turns, str(turn * beside + place + 1)).touch()
            return ran

        places = range(len(groups))
        return [*pool.map(run, places, *zip(*groups, strict=True))]


def parse_cases(words: Sequence[str]) -> list[argparse.Namespace]:
    """The command line, once for each of ``--cases``, whose options come before it."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--cases", default="")
    given, rest = finder.parse_known_args(words)
    names = given.cases.split(",") if given.cases else []
    unknown = next((name for name in names if name not in CASES), None)
    if unknown is not None:
        finder.error(f"--cases {unknown}: expected of {', '.join(CASES)}")
    if not names:
        return [parse_arguments(words)]
    return [parse_arguments([*CASES[name], *rest, "--cases", name]) for name in names]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """A command line of one case, ``sys.argv`` by default."""
    parser = harness.new_parser(
        __doc__, sources=(".wheels", "folder of archives or folders of Megatron-LM"),
        versions=("main-2026-08-22", "names in it, separated by commas"),
        json=("", "file for the results"), rounds=(3, "turns of all arms"),
        block=(8, "steps of an arm's turn"),
        untimed=(4, "first steps of a turn, which are not timed"),
        runs=(1, "process groups for each number of queues, in turns"),
        seconds=(280.0, "most seconds of a process group"), hidden=4096, layers=8, heads=32,
        sequence=(2048, "longest sequence, or row"), ranks=(2, "pipeline size"), microbatches=16,
        micro_batch=(1, "rows of a microbatch"),
        alone=(False, "run a process group of its own for each arm, all started at once, in turns"),
        documents=(False, "attention in packed rows ends at a sequence's end (THD)"),
        chunks=(2, "model chunks per rank"), vocabulary=8191, seed=1,
        layout=("", "as --pipeline-model-parallel-layout, for all arms"),
        rows=("equal,unlike,packed", f"of {', '.join(ROWS)}, separated by commas"),
        arms=("static,static-links,megatron,fused,dynamic",
              f"of {', '.join(NAMES)}; before a dynamic one's {', '.join(OTHERS)}, or s4096- for "
              f"slices; before a static one's {_PADDED}; {COMMAND}: the script with --use-dpp"),
        queues=("8", "numbers of hardware queues, separated by commas"),
        one_queue=("static,dynamic", "arms with one queue"),
        own_graphs=("--cuda-graph-impl transformer_engine --te-rng-tracker",
                    "flags of the host's own CUDA graphs"),
        median=(600.0, "median of the unlike lengths, which are lognormal with sigma 1"),
        layers_of=("local", f"whose layers: {', '.join(LAYERS)}"), fused_gradients=FUSED,
        more=("", "further flags of the script"),
        cases=("", f"tables with options of their own, one after the other: {', '.join(CASES)}"),
    )  # fmt: skip
    args = parser.parse_args(words)
    for name in ("versions", "rows", "arms", "queues", "one_queue"):
        setattr(args, name, getattr(args, name).split(","))
    known = [name for name, arm in NAMES.items() if arms.ARMS[arm].policy]
    static = [_PADDED + name for name, arm in NAMES.items() if not arms.ARMS[arm].policy]
    known = [
        *NAMES,
        COMMAND,
        *static,
        *(prefix + name for prefix in OTHERS for name in known if "eager" not in name),
    ]
    for flag, given, names in (
        ("arms", args.arms, known), ("one-queue", args.one_queue, known), ("rows", args.rows, ROWS),
        ("layers-of", [args.layers_of], list(LAYERS)),
    ):  # fmt: skip
        for name in given:
            if _SLICED.sub("", name, count=1) not in names:
                parser.error(f"--{flag} {name}: expected one of {', '.join(names)}")
    if args.layers % (args.ranks * args.chunks):
        parser.error(
            f"--layers {args.layers}: must be a multiple of --ranks {args.ranks} x --chunks "
            f"{args.chunks}"
        )
    if args.untimed >= args.block:
        parser.error(f"--untimed {args.untimed}: must be below --block {args.block}")
    for version in args.versions:
        if megatron_sources.find(Path(args.sources), version) is None:
            parser.error(
                f"--sources {args.sources}: neither {version} nor {version}.tar.xz is there"
            )
    return args


def unpacked(args: argparse.Namespace, version: str, folder: Path) -> Path:
    """The folder of a version's sources; an archive is unpacked below ``folder``."""
    found = megatron_sources.find(Path(args.sources), version)
    assert found is not None  # parse_arguments has looked
    return megatron_sources.unpacked(found, folder)


def lengths(args: argparse.Namespace, row: str) -> list[int]:
    """Tokens of all microbatches of a step; empty where all are of the longest length."""
    rng = random.Random(args.seed)
    if row == "equal":
        return []
    longest, microbatches = args.sequence, args.microbatches
    if row in ("unlike", "bucketed"):
        drawn = [_drawn(rng, args) for _ in range(microbatches)]
        if row == "unlike":
            return drawn
        buckets = DppConfig(length_buckets=_BUCKETS).buckets(longest)
        return [min(each for each in buckets if each >= length) for length in drawn]
    return [sum(documents) for documents in rows_of(args)]


def rows_of(args: argparse.Namespace, padded: bool = False) -> list[list[int]]:
    """The lengths of the sequences in each packed row, the last of which may be padding."""
    rng = random.Random(args.seed)
    sequences = [_drawn(rng, args)]
    while len(rows := _packed(sequences, args.sequence)) <= args.microbatches:
        full = rows
        sequences.append(_drawn(rng, args))
    rng.shuffle(full)
    more = [args.sequence - sum(row) if padded else 0 for row in full]
    return [[*row, *filter(None, [rest])] for row, rest in zip(full, more, strict=True)]


def _drawn(rng: random.Random, args: argparse.Namespace) -> int:
    length = rng.lognormvariate(0.0, 1.0) * args.median
    return max(16, min(args.sequence, round(length / 16) * 16))


def _packed(sequences: Sequence[int], most: int) -> list[list[int]]:
    """The sequences of each row into which they are packed, the longest first, by best fit."""
    rows: list[list[int]] = []
    for length in sorted(sequences, reverse=True):
        fits = [row for row in rows if sum(row) + length <= most]
        if fits:
            max(fits, key=sum).append(length)
        else:
            rows.append([length])
    return rows


def process_groups(args: argparse.Namespace, row: str) -> Iterator[tuple[str, list[str]]]:
    """Number of queues and arms of each process group, in the order in which they run."""
    for _ in range(args.runs):
        for queues in args.queues:
            names = [name for name in args.arms if queues != "1" or name in args.one_queue]
            groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
            for name in names:
                own, padded = tuple(own_flags(args, name)), name.startswith(_PADDED)
                if padded or row == "equal" or not _is_graphed(name):  # a graph has one shape
                    groups[own, padded, name if args.alone else ""].append(name)
            yield from ((queues, group) for group in groups.values())


def own_flags(args: argparse.Namespace, name: str) -> list[str]:
    """The flags of the script that an arm of this name has for itself."""
    if name == COMMAND:
        return ["--use-dpp"]
    return args.own_graphs.split() if _is_graphed(name) else []


def _is_graphed(name: str) -> bool:
    """True for an arm with the host's own CUDA graphs."""
    return NAMES.get(name.removeprefix(_PADDED)) in _OWN_GRAPHS


def arm_of(name: str, row: str = "") -> tuple[str, str, dict[str, Any]]:
    """An arm for plugin_entry.py: its name, its kind and its settings for this row."""
    import torch

    if name == COMMAND:
        return name, "own", {}
    name, given = name.removeprefix(_PADDED), name
    cut = _SLICED.match(name)
    bare = name[cut.end() :] if cut else name
    prefix = next((each for each in OTHERS if bare.startswith(each) and bare not in NAMES), "")
    arm = arms.ARMS[NAMES[bare.removeprefix(prefix)]]
    if arm.policy is not None:
        more = {"slice_tokens": int(cut[1])} if cut else {}
        if row == "bucketed":
            more["length_buckets"] = _BUCKETS
        return name, "dynamic", arm.settings() | OTHERS.get(prefix, {}) | more
    if NAMES[name] in (arms.LINKS, arms.GRAPHS_LINKS):
        return given, "static", {"transport": "cuda_ipc" if torch.cuda.is_available() else "shm"}
    return given, "own", {}


def flags(args: argparse.Namespace) -> list[str]:
    """The script's flags."""
    import torch

    words = (
        f"--num-layers {args.layers} --hidden-size {args.hidden} --seq-length {args.sequence} "
        f"--num-attention-heads {args.heads} --max-position-embeddings {args.sequence} "
        f"--micro-batch-size {args.micro_batch} "
        f"--global-batch-size {args.microbatches * args.micro_batch} --lr 0 --min-lr 0 "
        f"--seed {args.seed} --log-interval 1 "
        "--eval-iters 0 --eval-interval 100000 "
        f"--mock-data --tokenizer-type NullTokenizer --vocab-size {args.vocabulary} "
        "--num-workers 0 --attention-dropout 0 --hidden-dropout 0 "
        f"--pipeline-model-parallel-size {args.ranks} "
        f"--no-masked-softmax-fusion {LAYERS[args.layers_of]} {args.more}"
    )
    found = words.split()
    if not args.fused_gradients:
        found.append("--no-gradient-accumulation-fusion")
    if args.layout:
        found += ["--pipeline-model-parallel-layout", args.layout]
    elif args.chunks > 1:
        layers = args.layers // (args.ranks * args.chunks)
        found += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
    if torch.cuda.is_available():
        return [*found, "--bf16"]
    return [*found, "--distributed-backend", "gloo", "--use-cpu-initialization"]


def report(
    args: argparse.Namespace, group: str, found: Sequence[tuple[str, Sequence[Line]]]
) -> None:
    """Print a row's arms and what comes from what, arms of :data:`OTHERS` in a table before it."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\nhidden {args.hidden}, {args.layers} layers, PP{args.ranks} x {args.chunks}, "
        f"{args.microbatches} microbatches of at most {args.sequence} tokens, vocabulary "
        f"{args.vocabulary}, up to {args.block - args.untimed} timed steps of each turn, "
        f"{device}, torch {torch.__version__}"
    )
    for _, lines in found:
        plugin_group.print_untimed(lines, args.untimed)
    measured = [*gains(args, group, found)]
    others = [one for one in measured if one.arm not in arms.ARMS]
    if others:
        print("\nWith other settings:\n")
        own = [one.ms for one in measured if one.arm in (arms.STATIC, arms.GRAPHS)]
        own += [one.ms for one in measured if one.arm.startswith(_PADDED)]
        best = min(own, default=math.nan)
        harness.print_table(
            "row | arm | queues | median ms (min..max, turns) | reserved GB | / best static | "
            "losses equal",
            ([*one.cells(), f"{one.ms / best:.3f}", one.equal] for one in others),
        )
    graphs = any(one.arm in _OWN_GRAPHS for one in measured)
    arms.print_gains([one for one in measured if one.arm in arms.ARMS], graphs=graphs)


def gains(
    args: argparse.Namespace, group: str, found: Sequence[tuple[str, Sequence[Line]]]
) -> Iterator[arms.Measured]:
    """The arms for the table of gains: the median of each turn, the worst rank's peak, and how far
    loss and gradient norm are from the static schedule's.

    Args:
        found: number of queues, and lines of each process group.
    """
    numbers: dict[str, set[tuple[float, float]]] = defaultdict(set)
    turns: dict[tuple[str, str], list[float]] = defaultdict(list)
    reserved: dict[tuple[str, str], int] = defaultdict(int)
    for queues, lines in found:
        for line in lines:
            key = line.arm, queues
            reserved[key] = max(reserved[key], line.reserved)
            if line.loss is not None:
                numbers[line.arm].add((line.loss, line.norm))
        # The last stage's rank has the losses, and its steps are timed.
        last = [line for line in lines if line.loss is not None]
        timed = plugin_group.timed(last, args.untimed, int(args.alone and args.rounds > 1))
        for name, of_arm in timed.items():
            turns[name, queues] += [
                1e3 * statistics.median(line.seconds for line in turn) for turn in of_arm
            ]
    base = min(numbers.get("static") or {(math.nan, math.nan)})
    for (name, queues), times in turns.items():
        far = max(
            abs(ours - own) / abs(own)
            for pair in numbers[name]
            for ours, own in zip(pair, base, strict=True)
        )
        equal = "bitwise" if far == 0.0 else f"{far:.0e}"
        yield arms.Measured(
            NAMES.get(name, name), group, queues, times, reserved[name, queues], equal
        )


if __name__ == "__main__":
    raise SystemExit(main())
