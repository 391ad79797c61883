"""Flags of Megatron-LM under its own schedule and under the plug-in's: equal, passed through, or
refused.

    python profiling/gpu_plugin_matrix.py --sources DIR [--rows mla,experts] [--layers-of local]

DIR holds archives ``NAME.tar.xz`` of a whole Megatron-LM, ``pretrain_hybrid.py`` too. Each row
trains a small model for three steps with evaluations, twice, and compares losses, gradient norms
and a hash of every rank's parameters bit by bit. Ranks share GPUs where there are too few. A row of
which the host's own run fails, as for want of a package, prints the reason.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import harness

sys.path.insert(0, str(harness.ROOT))
from tests.plugin import hosts as sources
from tests.plugin.hosts import ENGINE, NEWEST, PP2X2, Hosts, records

PP2 = "--pipeline-model-parallel-size 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--disable-bias-linear"
)
SHARDED = "--use-distributed-optimizer"


class Row(NamedTuple):
    """One setting: flags beside the small model's, ranks, and the script that takes them."""

    flags: str
    ranks: int = 2
    script: str = "pretrain_gpt.py"


ROWS = {
    "plain": Row(PP2X2),
    "mtp": Row(f"{PP2} --mtp-num-layers 1 --position-embedding-type rope"),
    "mla": Row(f"{PP2X2} --multi-latent-attention"),
    "precision-aware": Row(
        f"{PP2X2} {SHARDED} --use-precision-aware-optimizer --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16"
    ),
    "offloaded-optimizer": Row(
        f"{PP2X2} {SHARDED} --use-precision-aware-optimizer --optimizer-cpu-offload"
    ),
    "muon": Row(f"{PP2X2} --optimizer muon"),
    "megatron-fsdp": Row(
        f"{PP2} {SHARDED} --use-megatron-fsdp --data-parallel-sharding-strategy "
        "optim_grads_params --ckpt-format fsdp_dtensor --init-model-with-meta-device",
        ranks=4,
    ),
    "torch-fsdp2": Row(f"{PP2} --use-torch-fsdp2 --untie-embeddings-and-output-weights", ranks=4),
    "sequence-parallel-experts": Row(
        f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel {EXPERTS} "
        "--moe-token-dispatcher-type alltoall",
        ranks=4,
    ),
    "experts": Row(f"{PP2X2} {EXPERTS} --moe-grouped-gemm --moe-token-dispatcher-type alltoall"),
    "expert-overlap": Row(
        f"{PP2X2} {EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        ranks=4,
    ),
    "packed-thd": Row(f"{PP2X2} --dataloader-inter-document-masking"),
    "own-graphs": Row(f"{PP2X2} --cuda-graph-impl transformer_engine --te-rng-tracker"),
    "hybrid": Row(f"{PP2} --hybrid-layer-pattern *-*-|*-*-", 2,
                  "pretrain_hybrid.py"),
}  # fmt: skip


def main() -> int:
    """Print the table; 1 if a row differs."""
    parser = harness.new_parser(
        __doc__, sources=(str(sources.SOURCES), "folder of archives of Megatron-LM"),
        version=(NEWEST, "name of an archive"),
        rows=(",".join(ROWS), "rows, separated by commas"),
        layers_of=("transformer_engine", "whose layers: transformer_engine or local"),
    )  # fmt: skip
    args = parser.parse_args()
    layers = ENGINE if args.layers_of == "transformer_engine" else ""
    unknown = [name for name in args.rows.split(",") if name not in ROWS]
    if unknown:
        parser.error(f"--rows {unknown[0]}: expected of {', '.join(ROWS)}")
    sources.SOURCES, found = Path(args.sources), []
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        for name in args.rows.split(","):
            found.append((name, *outcome(hosts, args.version, ROWS[name], layers, Path(folder))))
            print(*found[-1], sep=" | ", flush=True)
    harness.print_table("setting | result | line", found)
    return int(any(result == "differs" for _, result, _ in found))


def outcome(hosts: Hosts, version: str, row: Row, layers: str, folder: Path) -> tuple[str, str]:
    """The result of a row, and the plug-in's line or the reason."""
    record = Path(tempfile.mkdtemp(dir=folder))
    flags, more = f"{layers} {row.flags}", {"script": row.script}
    try:
        hosts.run(version, row.ranks, flags, record / "own", **more)  # type: ignore[arg-type]
    except AssertionError as error:
        return "the host's own run fails", reason(str(error))
    try:
        output = hosts.run(
            version,
            row.ranks,
            f"{flags} --use-dpp",
            record / "dynamic",
            **more,  # type: ignore[arg-type]
        )
    except AssertionError as error:
        return "differs", reason(str(error))
    lines = [line for line in output.splitlines() if "dynamic pipeline: not used" in line]
    said = lines[0].partition("runs: ")[2] if lines else ""
    same = records(record / "own", row.ranks) == records(record / "dynamic", row.ranks)
    return ("passes through" if lines else "equal") if same else "differs", said


def reason(output: str) -> str:
    """The last error of an output."""
    others = ("child", "Connection closed by peer")  # of ranks that another one's error ended
    errors = [
        line
        for line in output.splitlines()
        if "Error" in line and not any(words in line for words in others)
    ]
    return (errors or output.splitlines() or [""])[-1].strip()[:160]


if __name__ == "__main__":
    raise SystemExit(main())
