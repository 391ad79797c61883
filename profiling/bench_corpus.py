"""Time and memory of a large corpus: tokenizer, preprocessing, start of training.

The corpus repeats the sample until it has ``--gigabytes``, and is deleted at the end. The commands
run as they are, in processes of their own. A run on the sample alone says what a start costs in
any case. The second start finds the indices that the first one kept.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import harness
from harness import Ran

GIGA = 10**9
SAMPLE = harness.ROOT / "datasets_gpt" / "dataset.json"
SAMPLE_SECONDS = 0.2
ROOM = 2.0
"""Disk space over the size of the corpus: with it lie token files and indices."""
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --eval-iters 0 --transformer-impl local --tokenizer-type GPT2BPETokenizer"
)


def measured(command: list[str]) -> Ran:
    """Run a command and sample the resident memory of its processes."""
    return harness.run_sampled(command, SAMPLE_SECONDS, children=True)


def write_corpus(path: Path, size: int) -> int:
    """Repeat the sample's lines until ``size`` bytes are written; their number."""
    text = SAMPLE.read_bytes()
    copies = -(-size // len(text))
    with path.open("wb") as file:
        for _ in range(copies):
            file.write(text)
    return copies * text.count(b"\n")


def trained(corpus: Path, vocabulary: int) -> tuple[Ran, Path]:
    """Train a tokenizer as ``train --tokenizer train:N`` does; its folder."""
    program = (
        "import sys; from pathlib import Path\n"
        "from megatron.dpp_train.data.vocabulary import tokenizer_flags\n"
        "tokenizer_flags('gpt', sys.argv[2], Path(sys.argv[1]))"
    )
    ran = measured([sys.executable, "-c", program, str(corpus), f"train:{vocabulary}"])
    return ran, next(corpus.parent.glob(f"{corpus.stem}-bpe*"))


def preprocess(corpus: Path, vocabulary: Path, workers: int) -> tuple[Ran, str]:
    """Preprocess the corpus; the prefix of its token files."""
    words = ["--input", str(corpus), "--output-prefix", str(corpus.with_suffix(""))]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", str(workers)]
    ran = measured([*megatron_dpp("preprocess"), *words, *files_of(vocabulary)])
    return ran, f"{corpus.with_suffix('')}_text_document"


def start(prefix: str, vocabulary: Path, device: str) -> Ran:
    """Train one iteration of a small model in one process."""
    script = [sys.executable, str(harness.ROOT / "pretrain_gpt.py"), *MODEL.split()]
    data = ["--data-path", prefix, "--split", "1,0,0", "--device", device]
    return measured([*script, *data, *files_of(vocabulary)])


def megatron_dpp(command: str) -> list[str]:
    return [sys.executable, "-m", "megatron.dpp", command]


def files_of(vocabulary: Path) -> list[str]:
    names = ("vocab.json", "merges.txt")
    vocab, merges = (str(vocabulary / name) for name in names)
    return ["--vocab-file", vocab, "--merge-file", merges]


def measure(folder: Path, size: int, vocabulary: int, workers: int, device: str) -> None:
    """Take all steps and print the table."""
    corpus = folder / "corpus.jsonl"
    documents = write_corpus(corpus, size)
    tokenizer, files = trained(corpus, vocabulary)
    preprocessed, prefix = preprocess(corpus, files, workers)
    small = folder / "sample.jsonl"
    write_corpus(small, 1)
    _, little = preprocess(small, files, 1)
    rows = [
        ("tokenizer", tokenizer), ("preprocess", preprocessed),
        ("start on the sample", start(little, files, device)),
        ("start on the corpus", start(prefix, files, device)),
        ("start again", start(prefix, files, device)),
    ]  # fmt: skip
    stored = sum(Path(prefix + end).stat().st_size for end in (".bin", ".idx"))
    print(
        f"\n{corpus.stat().st_size / GIGA:.2f} GB, {documents:,} documents, {workers} workers, "
        f"device {device}; token files {stored / GIGA:.2f} GB\n"
    )
    harness.print_table(
        "step | s | MB/s | GB of the main process | GB together",
        (
            (name, f"{ran.seconds:.1f}",
             "" if "start" in name else f"{corpus.stat().st_size / ran.seconds / 1e6:.1f}",
             f"{ran.resident / GIGA:.2f}", f"{ran.together / GIGA:.2f}")
            for name, ran in rows
        ),
    )  # fmt: skip


def main() -> None:
    parser = harness.new_parser(
        __doc__,
        gigabytes=(10.0, "size of the corpus"),
        workers=(os.cpu_count() or 1, "processes of preprocess"),
        vocabulary=(32000, "tokens of the tokenizer"),
        folder=("", "where the corpus lies for the time; the temporary folder"),
        device=("cpu", "cpu or cuda, of the starts"),
    )
    options = parser.parse_args()
    size = round(options.gigabytes * GIGA)
    with tempfile.TemporaryDirectory(dir=options.folder or None, prefix="dpp-corpus-") as name:
        free = shutil.disk_usage(name).free
        if free < ROOM * size:
            needed = f"{ROOM * options.gigabytes:g} GB"
            parser.error(f"{name} has {free / GIGA:.1f} GB free, and {needed} are needed: --folder")
        measure(Path(name), size, options.vocabulary, options.workers, options.device)


if __name__ == "__main__":
    main()
