"""Ways to split one model over the GPUs of a host, with an unmodified Megatron-LM.

    python profiling/bench_parallel.py --sources DIR --layers-of transformer_engine --devices 2

DIR is as for bench_plugin.py. Each way is a process group of its own, which trains the same model
on the same number of sequences per step: data parallelism (a distributed optimizer), fully sharded
data parallelism (PyTorch's FSDP2 and megatron-core's), context, tensor (with sequence parallelism)
and pipeline parallelism, static and dynamic, of --devices ranks each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import bench_plugin
import harness


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


def main() -> int:
    """Measure and print the table; 1 if a way failed."""
    args = parse_arguments()
    rows, failed, found = [], [], {}
    tokens = args.batch * args.sequence
    with tempfile.TemporaryDirectory() as folder:
        root = bench_plugin.unpacked(args, args.versions, Path(folder))
        for name in args.ways:
            way, arms = WAYS[name], args.arms if name == "pp" else ["static"]
            lines = bench_plugin.run(
                root, flags(args, way), [bench_plugin.arm_of(arm) for arm in arms],
                processes=args.devices, queues="1" if name in ("tp", "cp") else "8",
                block=args.block,
                microbatches=args.batch // (args.devices if way.shares_batch else 1),
                seconds=args.seconds,
            )  # fmt: skip
            found[name] = lines
            if not lines:
                failed.append(name)
            for arm in arms:
                mine = [line for line in lines if line[0] == arm]
                took = [1e3 * line[2] for line in mine if line[1] >= args.untimed]
                if took:
                    ms, most = statistics.median(took), max(line[4] for line in mine) / 1e9
                    used = max(line[3] for line in mine) / 1e9
                    losses = [line[5] for line in mine if line[5] is not None]
                    rows.append(
                        (f"{name}, {arm}" if len(arms) > 1 else name,
                         f"{ms:.1f} ({min(took):.1f}..{max(took):.1f}, {len(took)})",
                         f"{tokens / ms / args.devices:.2f}", f"{used:.1f}", f"{most:.1f}",
                         f"{losses[-1]:.6f}")
                    )  # fmt: skip
                    print(*rows[-1], sep=" | ", flush=True)
            harness.write_json(args.json, {"settings": vars(args), "steps": found})
    print(
        f"\n{args.layers} layers, hidden {args.hidden}, {args.batch} sequences of {args.sequence} "
        f"tokens per step, {args.devices} devices\n"
    )
    harness.print_table(
        "way | median ms (min..max, steps) | thousand tokens/s per device | allocated GB | "
        "reserved GB | loss",
        rows,
    )
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


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
    args.ranks, args.microbatches = 1, args.batch
    return args


def flags(args: argparse.Namespace, way: Way) -> list[str]:
    """The script's flags for one way."""
    pipeline = way is WAYS["pp"]
    base = argparse.Namespace(**{**vars(args), "layout": "", "chunks": 1})
    steps = args.block * args.rounds * (len(args.arms) if pipeline else 1)
    words = (
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        f"--untie-embeddings-and-output-weights --ffn-hidden-size {args.ffn} "
        f"--group-query-attention --num-query-groups {args.groups} --train-iters {steps} "
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
