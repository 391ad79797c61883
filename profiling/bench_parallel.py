"""Ways to split one model over the GPUs of a host, with an unmodified Megatron-LM.

    python profiling/bench_parallel.py --sources DIR --layers-of transformer_engine --devices 2

DIR is as for bench_plugin.py. Each way is a process group of its own, which trains the same model
on the same number of sequences per step: data parallelism (a distributed optimizer), fully sharded
data parallelism (PyTorch's FSDP2 and megatron-core's), context, tensor (with sequence parallelism)
and pipeline parallelism, static and dynamic, of --devices ranks each.

Not timed are the first ``--untimed`` steps of an arm's turn, and its steps up to the last in which
a rank captured a CUDA graph. SIGTERM, SIGINT and ``--seconds`` end a process group: the steps
recorded so far are reported and written, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bench_plugin
import harness
import plugin_group
from plugin_group import Line


@dataclass(frozen=True)
class Way:
    """A way to split the model.

    Args:
        flags: of the script, with {n} for the number of devices.
        shares_batch: the devices share the sequences of a step among them.
    """

    flags: str
    shares_batch: bool = False


_DATA = "--overlap-grad-reduce --overlap-param-gather"
WAYS = {
    "dp": Way(f"--use-distributed-optimizer {_DATA}", shares_batch=True),
    "fsdp2": Way("--use-torch-fsdp2 --ckpt-format torch_dist", shares_batch=True),
    "megatron-fsdp": Way(
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        f"--ckpt-format fsdp_dtensor --use-distributed-optimizer {_DATA}",
        shares_batch=True,
    ),
    "cp": Way(f"--context-parallel-size {{n}} --use-distributed-optimizer {_DATA}"),
    "tp": Way("--tensor-model-parallel-size {n} --sequence-parallel"),
    "pp": Way("--pipeline-model-parallel-size {n}"),
}
"""Name of a way -> how."""


Row = tuple[str, ...]


def main() -> int:
    """Measure and print the table; 1 if a way did not end by itself."""
    args = parse_arguments()
    rows: list[Row] = []
    failed: dict[str, str] = {}
    found: dict[str, list[Line]] = {}
    with tempfile.TemporaryDirectory() as folder, harness.Stop() as stop:
        root = bench_plugin.unpacked(args, args.versions, Path(folder))
        for name in args.ways:
            if stop.reason:
                break
            way, arms = WAYS[name], args.arms if name == "pp" else ["static"]
            found[name], reason = plugin_group.run(
                root, flags(args, way), [bench_plugin.arm_of(arm) for arm in arms],
                processes=args.devices, queues="1" if name in ("tp", "cp") else "8",
                block=args.block, rounds=args.rounds,
                microbatches=args.batch // (args.devices if way.shares_batch else 1),
                seconds=args.seconds, stop=stop,
            )  # fmt: skip
            if reason:
                failed[name] = reason
            plugin_group.print_untimed(found[name], args.untimed)
            for row in rows_of(args, name, arms, found[name]):
                print(*row, sep=" | ", flush=True)
                rows.append(row)
            facts = {"settings": vars(args), "steps": found, "failed": failed}
            harness.write_json(args.json, facts)
    print(
        f"\n{args.layers} layers, hidden {args.hidden}, {args.batch} sequences of {args.sequence} "
        f"tokens per step, {args.devices} devices\n"
    )
    harness.print_table(
        "way | median ms (min..max, steps) | thousand tokens/s per device | allocated GB | "
        "reserved GB | loss",
        rows,
    )
    for name, reason in failed.items():
        print(f"not whole: {name}: {reason}")
    return int(bool(failed) or bool(stop.reason))


def rows_of(
    args: argparse.Namespace, name: str, arms: Sequence[str], lines: Sequence[Line]
) -> Iterator[Row]:
    """The rows of a way's arms that have timed steps, with the steps of all ranks."""
    timed = plugin_group.timed(lines, args.untimed)
    for arm in (arm for arm in arms if arm in timed):
        mine = [line for line in lines if line.arm == arm]
        took = [1e3 * line.seconds for turn in timed[arm] for line in turn]
        ms = statistics.median(took)
        losses = [line.loss for line in mine if line.loss is not None]
        yield (
            f"{name}, {arm}" if len(arms) > 1 else name,
            f"{ms:.1f} ({min(took):.1f}..{max(took):.1f}, {len(took)})",
            f"{args.batch * args.sequence / ms / args.devices:.2f}",
            f"{max(line.allocated for line in mine) / 1e9:.1f}",
            f"{max(line.reserved for line in mine) / 1e9:.1f}",
            f"{losses[-1]:.6f}" if losses else "-",
        )


def parse_arguments() -> argparse.Namespace:
    """The command line. The default model has the shape of Llama 3.2 3B."""
    parser = harness.new_parser(
        __doc__, sources=(".wheels", "folder of archives or folders of Megatron-LM"),
        versions=("main-2026-08-22", "one name in it"), json=("", "file for the results"),
        devices=2, ways=(",".join(WAYS), "separated by commas"), layers=28, hidden=3072, heads=24,
        groups=(8, "query groups"), ffn=(8192, "feed-forward size"), vocabulary=128255,
        sequence=4096, batch=(16, "sequences of a step"), block=(8, "steps of an arm"),
        untimed=(4, "first ones, which are not timed"), rounds=(1, "turns of the arms of a way"),
        arms=("static,static-links,megatron,dynamic", "of the pipeline, as bench_plugin.py's"),
        layout=("", "of the pipeline, as --pipeline-model-parallel-layout; even if empty"),
        chunks=(2, "model chunks per pipeline rank, without --layout"), seed=1,
        seconds=(150.0, "most seconds of a way"),
        layers_of=("local", f"whose layers: {', '.join(bench_plugin.LAYERS)}"),
        fused_gradients=bench_plugin.FUSED,
        more=("", "further flags of the script"),
    )  # fmt: skip
    args = parser.parse_args()
    args.ways, args.arms = args.ways.split(","), args.arms.split(",")
    for flag, given, known in (
        ("ways", args.ways, WAYS), ("layers-of", [args.layers_of], bench_plugin.LAYERS),
    ):  # fmt: skip
        for name in given:
            if name not in known:
                parser.error(f"--{flag} {name}: expected one of {', '.join(known)}")
    if args.batch % args.devices:
        parser.error(f"--batch {args.batch}: must be a multiple of --devices {args.devices}")
    args.ranks, args.microbatches, args.micro_batch = 1, args.batch, 1
    return args


def flags(args: argparse.Namespace, way: Way) -> list[str]:
    """The script's flags for one way."""
    pipeline = way is WAYS["pp"]
    base = argparse.Namespace(**{**vars(args), "layout": "", "chunks": 1})
    words = (
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        f"--untie-embeddings-and-output-weights --ffn-hidden-size {args.ffn} "
        f"--group-query-attention --num-query-groups {args.groups} "
        + way.flags.format(n=args.devices)
    ).split()
    if pipeline and args.layout:
        words += ["--pipeline-model-parallel-layout", args.layout]
    elif pipeline and args.chunks > 1:
        per_chunk = args.layers // (args.devices * args.chunks)
        words += ["--num-layers-per-virtual-pipeline-stage", str(per_chunk)]
    return [*bench_plugin.flags(base), *words]


if __name__ == "__main__":
    raise SystemExit(main())
