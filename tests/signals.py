"""Short jobs that get signals at random moments, for ``tools/soak.sh --signals N``.

A job is a run of two ranks or another command. It gets signals that it survives, and mostly one
that it does not. It has to end in time, to name the process, and to leave nothing. The next job of
its kind goes on in the same folder; what whole jobs leave is compared with an undisturbed one's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from tests.hf import tiny
from tests.nodes import MARK, Node, end, left_behind, stacks
from tests.soak import FLAGS, HARMLESS, SIGNALS, losses_in, write_tokens

DEADLINE = 150.0
_LONGEST_WAIT = 45.0
_TRAIN = f"{FLAGS} --train-iters 60 --save-interval 20 --log-interval 20"
_TRACKER = f'Traceback (most recent call last):\n  File "{resource_tracker.__file__}", line'
_MODEL_TEXT = "Who is Ada? She bakes bread in the old town, 1234567 loaves a day."
_TOKENIZER = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of job.

    Args:
        weight: share of the jobs.
        words: what Python starts.
        made: content of what whole jobs leave in their folder.
    """

    weight: int
    words: Callable[[Path], str]
    made: Callable[[Path], Any]


def _losses(folder: Path) -> dict[int, set[float]]:
    found: dict[int, set[float]] = defaultdict(set)
    for row in losses_in(folder / "metrics.jsonl"):
        found[row["iteration"]].add(row["loss"])
    return dict(found)


def _files(folder: Path) -> dict[str, bytes]:
    """All files of the output; metadata of a converted checkpoint hold its time and number."""
    found = sorted(path for path in folder.glob("out*/**/*") if path.is_file())
    found += sorted(path for path in folder.glob("out*") if path.is_file())
    return {
        path.name: path.read_bytes()
        for path in found
        if path.suffix != ".json" and path.name != ".metadata"
    }


def _run(folder: Path) -> str:
    place = f"--data-path {folder.parent}/tokens --data-cache-path {folder.parent}/cache "
    place += f"--metrics-file {folder}/metrics.jsonl --save {folder}/out --load {folder}/out"
    return f"{_TRAIN} {place}"


def _torchrun(folder: Path) -> str:
    start = "-m torch.distributed.run --standalone --nproc_per_node 2"
    return f"{start} pretrain_gpt.py {_run(folder)}"


def _launcher(folder: Path) -> str:
    start = f"-m megatron.dpp train --mode megatron --procs 2 --run-dir {folder}/run"
    return f"{start} {_run(folder)}"


def _preprocess(folder: Path) -> str:
    files = f"--input {folder.parent}/text.jsonl --output-prefix {folder}/out --append-eod"
    words = f"{files} --workers 2 {_TOKENIZER} {folder.parent}/model"
    return f"-m megatron.dpp preprocess {words}"


def _generate(folder: Path) -> str:
    words = "--max-new-tokens 40 --prompt Who --prompt Ada --device cpu"
    return f"-m megatron.dpp generate {folder.parent}/model {words} --output {folder}/out.jsonl"


KINDS = {
    "torchrun": Kind(2, _torchrun, _losses),
    "saves beside training": Kind(
        2,
        lambda f: f"{_torchrun(f)} --async-save --async-strategy mcore --num-workers 2",
        _losses,
    ),
    "launcher": Kind(1, _launcher, _losses),
    "preprocess": Kind(6, _preprocess, _files),
    "convert": Kind(
        3, lambda f: f"-m megatron.dpp convert {f.parent}/model {f}/out", lambda f: _files(f)
    ),
    "generate": Kind(2, _generate, _files),
}


@dataclasses.dataclass
class Sent:
    """A signal, and what came of it."""

    kind: str
    victim: str
    number: str
    effect: str
    seconds: float = 0.0
    culprit: str = ""
    said: str = ""
    faults: list[str] = dataclasses.field(default_factory=list)


def victims(node: Node, kind: str) -> Iterator[tuple[str, psutil.Process]]:
    """The processes of a job by what they do."""
    tree = node.tree()
    for process in tree:
        with contextlib.suppress(psutil.Error):
            is_root, environ = process.pid == node.process.pid, process.environ()
            is_run = KINDS[kind].made is _losses
            if is_root:
                yield ("torchrun or launcher" if is_run else kind), process
            elif "RANK" in environ and process.ppid() == tree[0].pid:
                yield "rank", process
            elif "RANK" in environ:
                data = process.name() == "pt_data_worker"
                yield ("data worker" if data else "writer of a rank"), process
            else:
                yield ("log copier" if is_run else f"child of {kind}"), process


class Signals:
    """Jobs until so many signals are sent, or the time is over."""

    def __init__(self, folder: Path, seed: int, log: Path | None) -> None:
        self._folder, self._random, self._log = folder, random.Random(seed), log
        self._before = set(os.listdir("/dev/shm"))
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._expected: dict[str, tuple[Any, float]] = {}
        self.done: list[Sent] = []
        self.compared = self.unequal = self.jobs = 0

    def prepare(self) -> None:
        """Write the files that jobs read, and note what undisturbed ones leave."""
        write_tokens(self._folder / "tokens")
        model = self._folder / "model"
        model.mkdir()
        tiny.add_tokenizer(model, [_MODEL_TEXT], 290)
        tiny.make("llama", model, vocab_size=290, bos_token_id=0, eos_token_id=1)
        lines = [json.dumps({"text": f"Ada bakes bread number {i} " * 20}) for i in range(3000)]
        (self._folder / "text.jsonl").write_text("\n".join(lines) + "\n")
        for kind in KINDS:
            start = time.monotonic()
            with self._job(kind) as node:
                code = node.process.wait(1200)
                assert code == 0, f"{kind}: {node.said()}"
            made = KINDS[kind].made(self._folder / kind.replace(" ", "-"))
            assert made, kind
            self._expected[kind] = made, time.monotonic() - start
            self._clear(kind)
            print(f"{kind}: {self._expected[kind][1]:.0f} s undisturbed", flush=True)

    def run(self, count: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
        while len(self.done) < count and time.monotonic() < until:
            (kind,) = self._random.choices(names, weights)
            self.jobs += 1
            with self._job(kind) as node:
                self._disturb(kind, node)

    @contextlib.contextmanager
    def _job(self, kind: str) -> Iterator[Node]:
        folder = self._folder / kind.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        settings = {
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", MARK: str(os.getpid()),
            "TMPDIR": str(self._temporary), "PYTHONFAULTHANDLER": "", "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1", "DPP_PEER_TIMEOUT": "5", "PYTHONPATH": os.getcwd(),
        }  # fmt: skip
        node = Node(
            [sys.executable, *KINDS[kind].words(folder).split()], folder / "log", **settings
        )
        try:
            yield node
        finally:
            end(node)

    def _disturb(self, kind: str, node: Node) -> None:
        usual = self._expected[kind][1]
        self._wait(node, self._random.uniform(0.0, min(usual, _LONGEST_WAIT)))
        for _ in range(self._random.randint(0, 4)):
            self._send(kind, node, self._random.choice(["pause", "pause", "harmless"]))
            self._wait(node, self._random.uniform(0.0, min(usual / 8, 1.5)))
        if self._random.random() < 0.8:
            self._send(kind, node, "stop" if self._random.random() < 0.12 else "deadly")
        if self._wait(node, DEADLINE + 2 * usual) is None and self.done:
            self._note(self.done[-1], f"not ended: {stacks(node)[-4000:]}")
        if node.process.returncode == 0:
            self._compare(kind)

    def _send(self, kind: str, node: Node, effect: str) -> None:
        """Send a signal, wait for what has to come of it, and look at that."""
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        for name, process in victims(node, kind):
            found[name].append(process)
        if not found:
            return
        name = self._random.choice(sorted(found))
        victim = self._random.choice(found[name])
        is_root = victim.pid == node.process.pid
        if effect == "stop" and is_root:
            effect = "pause"  # nobody waits for it
        sent = Sent(kind, name, "SIGSTOP", effect, culprit=str(victim.pid))
        start = time.monotonic()
        try:
            if effect in ("stop", "pause"):
                victim.suspend()
                self._wait(node, self._random.uniform(0.2, 2.0) if effect == "pause" else DEADLINE)
                with contextlib.suppress(psutil.Error):
                    victim.resume()
            else:
                names = HARMLESS if effect == "harmless" else SIGNALS
                sent.number = f"SIG{self._random.choice(names)}"
                victim.send_signal(getattr(signal, sent.number))
                if effect == "deadly":
                    self._wait(node, DEADLINE)
        except psutil.NoSuchProcess:
            return  # it had ended by itself
        self.done.append(sent)
        if effect in ("deadly", "stop"):
            sent.seconds = time.monotonic() - start
            self._judge(sent, node, is_root=is_root)
        print(json.dumps(dataclasses.asdict(sent))[:300], flush=True)
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(sent)) + "\n")

    def _judge(self, sent: Sent, node: Node, *, is_root: bool) -> None:
        code = node.process.poll()
        if code is None:
            if is_root or sent.victim == "rank":
                self._note(sent, "it went on, or waits")
            return
        said = node.said()
        marks = ("error", "warning", "exitcode: -")  # the last is torchrun's
        lines = [each for each in said.splitlines() if any(mark in each for mark in marks)]
        is_run = KINDS[sent.kind].made is _losses
        names = (sent.culprit,) if is_run else (sent.culprit, "worker process")
        sent.said = next((each for each in lines if any(n in each for n in names)), "")[:300]
        if code and not is_root and not sent.said:
            self._note(sent, f"nobody named it: {said[-3000:]}")
        # Megatron's loop and torchrun print some. Python's own: the successor of a killed resource
        # tracker knows none of its names.
        if not is_run and "Traceback (most recent call last)" in said.replace(_TRACKER, ""):
            self._note(sent, f"a traceback: {said[-4000:]}")
        of_killed = {path.name for path in self._temporary.glob("torchelastic_*")}
        for each in left_behind(self._before, self._temporary, of_killed):
            self._note(sent, f"left: {each}")

    def _note(self, sent: Sent, fault: str) -> None:
        sent.faults.append(fault)
        print(f"FAULT {sent.kind}, {sent.victim}, {sent.number}: {fault[-1500:]}", flush=True)

    def _compare(self, kind: str) -> None:
        """Compare a whole job's output with an undisturbed one's; nothing lies beside it."""
        folder = self._folder / kind.replace(" ", "-")
        found, expected = KINDS[kind].made(folder), self._expected[kind][0]
        self.compared += 1
        if found != expected:
            self.unequal += 1
            print(f"UNEQUAL {kind}: {str(found)[:500]} expected {str(expected)[:500]}", flush=True)
        partial = [*folder.glob(".*partial*"), *folder.rglob("*unfinished*")]
        if partial and self.done:
            self._note(self.done[-1], f"left beside the output: {partial}")
        self._clear(kind)

    def _clear(self, kind: str) -> None:
        shutil.rmtree(self._folder / kind.replace(" ", "-"))

    def _wait(self, node: Node, seconds: float) -> float | None:
        """Until the job's end; None after so many seconds without one."""
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            if node.process.poll() is not None:
                return time.monotonic() - start
            time.sleep(0.1)
        return None


def report(signals: Signals, seconds: float) -> int:
    """Print the tables; the number of faults."""
    rows: dict[tuple[str, str], list[Sent]] = defaultdict(list)
    for each in signals.done:
        effects = {"deadly": "a deadly signal", "stop": "SIGSTOP for good"}
        rows[each.victim, effects.get(each.effect, "a pause, or no effect")].append(each)
    print(f"\n| to | signal | number | ended in s, longest | named | faults |\n|{'---|' * 6}")
    for (victim, effect), group in sorted(rows.items()):
        named = sum(bool(each.said) for each in group)
        longest = max(each.seconds for each in group)
        faults = sum(bool(each.faults) for each in group)
        print(f"| {victim} | {effect} | {len(group)} | {longest:.1f} | {named} | {faults} |")
    print(f"\n| {seconds / 60:.0f} minutes | |\n|---|---|\n| jobs | {signals.jobs} |")
    print(f"| signals | {len(signals.done)} |")
    print(f"| whole jobs compared, unequal | {signals.compared}, {signals.unequal} |")
    return sum(bool(each.faults) for each in signals.done) + signals.unequal


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/soak.sh --signals")
    parser.add_argument("count", type=int)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="dpp-signals-") as name:
        signals = Signals(Path(name), options.seed, options.log)
        signals.prepare()
        start = time.monotonic()
        try:
            signals.run(options.count, 3600 * options.hours)
        finally:
            faults = report(signals, time.monotonic() - start)
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
