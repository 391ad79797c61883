"""Flags of Megatron-LM under its own schedule and under the plug-in's: equal, passed through, or
refused.

    python profiling/gpu_plugin_matrix.py --sources DIR [--rows mla,experts] [--layers-of local]
    python profiling/gpu_plugin_matrix.py --sources DIR --parse

DIR holds archives ``NAME.tar.xz`` of a whole Megatron-LM with all of its scripts, or folders. Each
row trains a small model for three steps or more with evaluations, under the host's schedule and
under the dynamic one with injected delays, and compares losses, gradient
norms and a hash of every rank's parameters bit by bit. Ranks share GPUs where there are too few. A
row of which the host's own run fails, as for want of a package, prints the reason.

``--parse`` runs nothing: Megatron-LM's own parser reads the flags of each row, without a GPU.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import harness

from tests.plugin import hosts as sources
from tests.plugin.hosts import ENGINE, MODEL, NEWEST, ON_CPU, PP2X2, Hosts, records

PP2 = "--pipeline-model-parallel-size 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--disable-bias-linear"
)
SHARDED = "--use-distributed-optimizer"
FP8 = (
    "--hidden-size 256 --ffn-hidden-size 512 --seq-length 128 --max-position-embeddings 128 "
    "--train-iters 20 --eval-interval 10 --fp8-format hybrid --fp8-recipe"
)
UNLIKE = "--use-dpp --dpp-policy dynamic --dpp-inject jitter:0.5"
"""An order of tasks that is not the static schedule's."""


class Row(NamedTuple):
    """One setting.

    Args:
        flags: beside the small model's; ``FOLDER`` stands for one with chats and their tokenizer.
        script: that takes them.
        model: the small model's flags.
        more: a function of the script that adds flags to the parser.
    """

    flags: str
    ranks: int = 2
    script: str = "pretrain_gpt.py"
    model: str = MODEL
    more: str = ""


_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127"
_CHATS = " ".join(f"--{split}-data-path FOLDER/chats.jsonl" for split in ("train", "valid", "test"))


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
    "sft": Row(
        f"{PP2X2} --sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format default "
        f"--tokenizer-model FOLDER {_CHATS} --micro-batch-size 1 --global-batch-size 8 "
        "--no-create-attention-mask-in-dataloader",
        model=MODEL.replace(_DATA, ""),
    ),
    "vision-language": Row(
        f"{PP2} --img-h 28 --img-w 28 --patch-dim 14 --dataloader-seq-length 64 "
        "--ckpt-format torch",
        script="pretrain_vlm.py", more="add_vlm_extra_args",
    ),
    "fp8-tensorwise": Row(f"{PP2X2} {FP8} tensorwise"),
    "fp8-blockwise": Row(f"{PP2X2} {FP8} blockwise"),
    "fp8-delayed": Row(f"{PP2X2} {FP8} delayed"),
    "fp8-no-biases": Row(f"{PP2X2} {FP8} tensorwise --disable-bias-linear --swiglu"),
    "fp8-experts": Row(
        f"{PP2X2} {FP8} tensorwise {EXPERTS} --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall"
    ),
    "hybrid": Row(f"{PP2} --hybrid-layer-pattern *-*-|*-*-", 2,
                  "pretrain_hybrid.py"),
}  # fmt: skip


def main() -> int:
    """Print the table; 1 if a row differs."""
    parser = harness.new_parser(
        __doc__, sources=(str(sources.SOURCES), "folder of archives of Megatron-LM"),
        version=(NEWEST, "name of an archive"),
        rows=(",".join(ROWS), "rows, separated by commas"),
        layers_of=("transformer_engine", "whose: transformer_engine, or local on the CPU"),
        parse=(False, "only let Megatron-LM's parser read the flags"),
    )  # fmt: skip
    args = parser.parse_args()
    layers = ENGINE if args.layers_of == "transformer_engine" else ""
    if not layers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    unknown = [name for name in args.rows.split(",") if name not in ROWS]
    if unknown:
        parser.error(f"--rows {unknown[0]}: expected of {', '.join(ROWS)}")
    sources.SOURCES, found = Path(args.sources), []
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        if args.parse:
            found = parsed(hosts, args.version, args.rows.split(","), layers or ON_CPU)
            harness.print_table("setting | flags", found)
            return int(any(not result.startswith(("read", "no ")) for _, result in found))
        for name in args.rows.split(","):
            found.append((name, *outcome(hosts, args.version, ROWS[name], layers, Path(folder))))
            print(*found[-1], sep=" | ", flush=True)
    harness.print_table("setting | result | line", found)
    return int(any(result == "differs" for _, result, _ in found))


def outcome(hosts: Hosts, version: str, row: Row, layers: str, folder: Path) -> tuple[str, str]:
    """The result of a row, and the plug-in's line or the reason."""
    record = Path(tempfile.mkdtemp(dir=folder))
    own = Path(tempfile.mkdtemp(dir=folder))
    if "FOLDER" in row.flags:
        write_chats(own)
    flags = f"{layers} {row.flags.replace('FOLDER', str(own))}"
    more = {"script": row.script, "model": row.model}
    try:
        hosts.run(version, row.ranks, flags, record / "own", **more)
    except AssertionError as error:
        return "the host's own run fails", reason(str(error))
    try:
        output = hosts.run(version, row.ranks, f"{flags} {UNLIKE}", record / "dynamic", **more)
    except AssertionError as error:
        return "differs", reason(str(error))
    lines = [line for line in output.splitlines() if "dynamic pipeline: not used" in line]
    said = lines[0].partition("runs: ")[2] if lines else ""
    same = records(record / "own", row.ranks) == records(record / "dynamic", row.ranks)
    return ("passes through" if lines else "equal") if same else "differs", said


def write_chats(folder: Path) -> None:
    """Write chats of numbers, and a tokenizer of numbers with a template, as Hugging Face has it.

    Raises:
        ImportError: tokenizers or transformers is not installed.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    numbers = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(2, 128)}
    words = Tokenizer(WordLevel(numbers, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}<eos>"
    made.save_pretrained(folder)
    draw, lines = random.Random(1), []
    for _ in range(64):
        texts = [" ".join(str(draw.randint(2, 127)) for _ in range(draw.randint(1, 12)))
                 for _ in range(3)]  # fmt: skip
        roles = ("system", "user", "assistant")
        chat = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        lines.append(json.dumps({"messages": chat}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


_PARSE = """
import json, sys
from importlib import import_module
from megatron.dpp.core import cpu
cpu.install(host=True)
from megatron.training.arguments import parse_args
for name, words, script, more in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        own = getattr(import_module(script), more) if more else None
        parse_args(extra_args_provider=own)
        print("ROW", json.dumps([name, "read"]))
    except SystemExit:
        print("ROW", json.dumps([name, "refused: see above"]))
"""


def parsed(hosts: Hosts, version: str, names: Sequence[str], layers: str) -> list[tuple[str, str]]:
    """The answers of a version's parser to the flags of each row.

    Raises:
        RuntimeError: Megatron-LM cannot be imported; with its output.
    """
    root, found, asked = hosts.unpacked(version), {}, []
    for name in names:
        row = ROWS[name]
        if not (root / row.script).is_file():
            found[name] = f"no {row.script} in {version}"
            continue
        words = f"{row.model} {layers} {row.flags}".split()
        asked.append((name, words, row.script.removesuffix(".py"), row.more))
    path = os.pathsep.join(map(str, (root, harness.ROOT, *hosts.paths)))
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, json.dumps(asked)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}, timeout=300,
        cwd=root,
    )  # fmt: skip
    told = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    found |= dict(json.loads(line) for line in told)
    if len(found) < len(names):
        raise RuntimeError(done.stdout + done.stderr)
    if any(result.startswith("refused") for result in found.values()):
        print(done.stderr, file=sys.stderr)
    return [(name, found[name]) for name in names]


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
