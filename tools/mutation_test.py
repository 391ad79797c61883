"""Mutation testing: puts small faults into a copy of the code, one at a time, and runs the tests.

``tools/mutation_test.sh`` calls it and documents it. The operators are those of cosmic-ray, for
C++ those of ``mutation_cpp.py``. A test file is chosen for a mutant if it executes a line of the
mutated statement, sub-processes counted; for one in C++ all are.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import mutation_cpp
import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
STATE = REPOSITORY / "build" / "mutation"
PACKAGES = STATE / "packages"
"""cosmic-ray with its requirements; last in the path, as the environment's packages come first."""
MARK = "MUTATION_TEST_RUN"
REFUSED = "does not compile"
NOTICED = ("killed", "timed out", REFUSED)
PRELOADED = ("torch", "megatron.core.optimizer", "megatron.core.models.gpt")
"""Large modules that every forked test run shares."""


@dataclass
class Mutant:
    """One fault: an operator applied to one of the places that it fits."""

    module: str
    line: int
    operator: str
    occurrence: int
    position: tuple[int, ...]
    diff: str
    verdict: str = ""


# Mutants ------------------------------------------------------------------------------------------


def mutants_of(module: str) -> Iterator[Mutant]:
    """All faults of a module, without their differences; annotations have none."""
    if is_cpp(module):
        text = (REPOSITORY / module).read_text("utf-8")
        for number, (name, start, end, _) in enumerate(mutation_cpp.faults_of(text)):
            yield Mutant(module, text.count("\n", 0, start) + 1, name, number, (start, end), "")
        return
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.commands.init import _operators

    source = (REPOSITORY / module).read_text("utf-8")
    unread = [
        (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        for node in _annotations(ast.parse(source))
    ]
    nodes = list(ast_nodes(get_ast(source)))
    for name, _, operator in _operators({}):
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            if any(a[:2] <= tuple(start) and tuple(end) <= a[2:] for a in unread):
                continue
            yield Mutant(module, start[0], name, occurrence, (*start, *end), "")


def is_cpp(module: str) -> bool:
    """True for a file of C++."""
    return module.endswith(mutation_cpp.SUFFIXES)


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            found = getattr(node, field, None)
            if isinstance(found, ast.expr):
                yield found


def describe(mutant: Mutant) -> bool:
    """Fill in the difference; False if the text is no Python or means the same."""
    source, changed = (REPOSITORY / mutant.module).read_text("utf-8"), mutated(mutant)
    try:
        if not is_cpp(mutant.module) and ast.dump(ast.parse(source)) == ast.dump(
            ast.parse(changed)
        ):
            return False
    except SyntaxError:
        return False
    lines = difflib.unified_diff(
        source.splitlines(), changed.splitlines(), mutant.module, mutant.module, lineterm="", n=2
    )
    mutant.diff = "\n".join(lines)
    return True


def mutated(mutant: Mutant) -> str:
    """The module's text with the fault in it."""
    if is_cpp(mutant.module):
        text = (REPOSITORY / mutant.module).read_text("utf-8")
        _, start, end, instead = list(mutation_cpp.faults_of(text))[mutant.occurrence]
        return text[:start] + instead + text[end:]
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (REPOSITORY / mutant.module).read_text("utf-8")
    text = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    if text is None:
        raise SystemExit(f"mutation_test: error: {mutant.module} changed; start without --again")
    return str(text)


def sample(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """Draws places first and then one fault of each, as some operators fit a place in many ways."""
    dice = random.Random(seed)
    places: dict[tuple[object, ...], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault((mutant.module, mutant.position), []).append(mutant)
    order = sorted(places, key=str)
    dice.shuffle(order)
    drawn = (dice.choice(places[place]) for place in order)
    return sorted(islice(filter(describe, drawn), size), key=lambda m: (m.module, m.line))


def changed_lines(branch: str) -> dict[str, set[int]]:
    """Lines of each module of megatron that differ from where this branch left another."""
    base = _git("merge-base", "HEAD", branch).strip()
    text = _git("diff", "--unified=0", "--no-prefix", base, "--", "megatron/*.py")
    found: dict[str, set[int]] = {}
    module = ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            module = line[4:]
        span = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)
        if span and module != "/dev/null":
            first, count = int(span[1]), int(span[2] or 1)
            found.setdefault(module, set()).update(range(first, first + count))
    return found


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mutation_test: error: git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


# Test runs ----------------------------------------------------------------------------------------


class Tree:
    """A copy of the working tree, with the built extension, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._age = 1_000_000_000
        listed = _git("ls-files", "-co", "--exclude-standard", "-z").split("\0")
        built = [str(path.relative_to(REPOSITORY))
                 for pattern in ("megatron/dpp/**/*.so", "build/temp*/**/*.o")
                 for path in REPOSITORY.glob(pattern)]  # fmt: skip
        for name in filter(None, [*listed, *built]):
            if (REPOSITORY / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, folder / name)

    def write(self, module: str, text: str) -> None:
        """Replace a module. Its new time differs from all before: cached bytecode is then stale.
        A file of C++ is newer than what was built of it.
        """
        (self.folder / module).write_text(text, "utf-8")
        if is_cpp(module):
            return
        self._age += 10
        os.utime(self.folder / module, (self._age, self._age))

    def run(self, tests: list[str], limit: float, data: Path | None = None) -> int | None:
        """Pytest's exit status in a fork of this process, which has large modules loaded already;
        None if it is not done within ``limit`` seconds. Ends all processes that are left of it.

        Args:
            data: measure the coverage into this file.
        """
        child = os.fork()
        if child == 0:
            _run_tests(self.folder, tests, data)
        try:
            deadline = time.monotonic() + limit
            while time.monotonic() < deadline:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    child = 0
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.05)
            return None
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
            _end_processes()
            if child:
                os.waitpid(child, 0)


def _run_tests(folder: Path, tests: list[str], data: Path | None) -> None:
    """The forked process: runs the tests in a copy of the tree, and does not return."""
    status = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        os.chdir(folder)
        sys.path[:] = [p for p in sys.path if not p.startswith(str(REPOSITORY / "tools"))]
        with open(STATE / "last_run.txt", "w", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        import pytest

        measure = None
        if data is not None:
            import coverage

            measure = coverage.Coverage(data_file=str(data), config_file="pyproject.toml")
            measure.start()
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
        if measure is not None:
            measure.stop()
            measure.save()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_processes() -> None:
    """Kill what a test run has left, also in other sessions: all inherit the mark."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(os.getpid()):
                process.kill()
        except (psutil.Error, OSError):
            continue


# Choice of tests ----------------------------------------------------------------------------------


class Choice:
    """The test files with their times and the lines that they execute, measured and remembered."""

    def __init__(self, tree: Tree, paths: list[str], modules: list[str]) -> None:
        self._tree, self._file = tree, STATE / "measured.json"
        self._modules = {module: _digest(module) for module in modules}
        self._known = json.loads(self._file.read_text("utf-8")) if self._file.exists() else {}
        self._tests = sorted(
            str(path.relative_to(REPOSITORY))
            for name in paths
            for path in ([REPOSITORY / name] if name.endswith(".py") else
                         (REPOSITORY / name).rglob("test_*.py"))
        )  # fmt: skip

    def measure(self, limit: float) -> None:
        """Run the test files whose measurement is missing, or older than a file."""
        stale = [test for test in self._tests if not self._is_fresh(test)]
        for number, test in enumerate(stale, 1):
            print(f"measuring {number}/{len(stale)}: {test}", flush=True)
            self._known[test] = self._measure(test, limit)
            self._file.write_text(json.dumps(self._known), "utf-8")
        for test in self._tests:
            if self._known[test]["status"] not in (0, 5):
                print(f"left out: {test} does not pass in {limit:g} s on unchanged code")

    def _is_fresh(self, test: str) -> bool:
        known = self._known.get(test)
        if not known or known["status"] not in (0, 5) or known["digest"] != _digest(test):
            return False
        return all(
            known["modules"].get(module, digest) == digest
            for module, digest in self._modules.items()
        )

    def _measure(self, test: str, limit: float) -> dict[str, object]:
        import coverage

        folder = STATE / "coverage"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begin, before = time.monotonic(), os.times()
        status = self._tree.run([test], limit, folder / "part")
        seconds, after = time.monotonic() - begin, os.times()
        work = sum(after[2:4]) - sum(before[2:4])
        config = str(self._tree.folder / "pyproject.toml")
        total = coverage.Coverage(data_file=str(folder / "total"), config_file=config)
        parts = [str(part) for part in folder.glob("part*")]
        total.combine(parts, strict=False)
        data = total.get_data()
        lines = {
            "megatron/" + file.rpartition("megatron/")[2]: sorted(data.lines(file) or ())
            for file in data.measured_files()
        }
        return {
            "digest": _digest(test), "status": status, "seconds": seconds, "work": work,
            "lines": lines,
            "modules": {module: _digest(module) for module in lines
                        if (REPOSITORY / module).exists()},
        }  # fmt: skip

    def tests_of(self, mutant: Mutant, deadline: float) -> tuple[list[str], float]:
        """The test files that execute the mutated statement, those first that execute much of the
        module in little CPU time, as many as the deadline allows; and their time in seconds.
        """
        ranked = []
        for test in self._tests:
            known = self._known[test]
            if known["status"] == 0 and (value := self._value(known, test, mutant)):
                ranked.append((known["work"] / value, test))
        chosen, total, seconds = [], 0.0, 0.0
        for _, test in sorted(ranked):
            known = self._known[test]
            if not chosen or total + known["work"] <= deadline:
                chosen.append(test)
                total += known["work"]
                seconds += known["seconds"]
        return chosen, seconds

    @staticmethod
    def _value(known: dict[str, dict[str, list[int]]], test: str, mutant: Mutant) -> int:
        """The lines of the module that a test executes, 0 if none of the mutated statement. Of C++
        the tests of the same words count most, as executed lines are not known.
        """
        if is_cpp(mutant.module):
            words = set(Path(mutant.module).stem.split("_"))
            return 1 + 99 * len(words & set(Path(test).stem.split("_")))
        lines = known["lines"].get(mutant.module, [])
        wanted = statement_lines((REPOSITORY / mutant.module).read_text("utf-8"), mutant.line)
        return 0 if wanted.isdisjoint(lines) else len(lines)


def _digest(name: str) -> str:
    return hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()[:16]


def statement_lines(source: str, line: int) -> set[int]:
    """The lines of the innermost statement around a line; of a compound one, those of its head."""
    best = {line}
    size = float("inf")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        if node.lineno <= line <= max(end, node.lineno) and end - node.lineno < size:
            best, size = set(range(node.lineno, max(end, node.lineno) + 1)), end - node.lineno
    return best


# The run ------------------------------------------------------------------------------------------


def verdict(tree: Tree, mutant: Mutant, tests: list[str], seconds: float) -> str:
    """Put a fault in, run the tests, take it out again."""
    if not tests:
        return "survived (no test executes it)"
    original = (tree.folder / mutant.module).read_text("utf-8")
    tree.write(mutant.module, mutated(mutant))
    try:
        if is_cpp(mutant.module) and not mutation_cpp.build(tree.folder):
            return REFUSED
        status = tree.run(tests, limit=30 + 4 * seconds)
    finally:
        tree.write(mutant.module, original)
    if status is None:
        return "timed out"
    return "survived" if status == 0 else "killed"


def report(mutants: list[Mutant]) -> str:
    """The table by module, and the differences that no test noticed."""
    mutants = [mutant for mutant in mutants if mutant.verdict != REFUSED]
    rows = [f"{'module':48} mutants  killed  timed out  survived  not run"]
    for module in [*sorted({mutant.module for mutant in mutants}), "all"]:
        verdicts = [m.verdict.partition(" (")[0] for m in mutants if module in (m.module, "all")]
        count = Counter(verdicts)
        rows.append(
            f"{module:48} {len(verdicts):7} {count['killed']:7} {count['timed out']:10} "
            f"{count['survived']:9} {count['']:8}"
        )
    survivors = [m for m in mutants if m.verdict.startswith("survived")]
    rows += [f"\n{m.verdict}: {m.operator} {m.occurrence}\n{m.diff}" for m in survivors]
    return "\n".join(rows)


def load(again: bool, arguments: argparse.Namespace) -> list[Mutant]:
    """The mutants of this run, from the last one's record or drawn."""
    if again:
        try:
            record = json.loads((STATE / "results.json").read_text("utf-8"))
        except OSError:
            raise SystemExit("mutation_test: error: --again: there is no earlier run") from None
        if any(_digest(module) != digest for module, digest in record["digests"].items()):
            raise SystemExit("mutation_test: error: --again: a mutated module has changed since")
        return [Mutant(**mutant) for mutant in record["mutants"]]
    if arguments.files:
        lines = {str(Path(f).resolve().relative_to(REPOSITORY)): None for f in arguments.files}
    else:
        lines = dict(changed_lines(arguments.against))
    missing = [module for module in lines if not (REPOSITORY / module).is_file()]
    if missing:
        raise SystemExit(f"mutation_test: error: no such file: {', '.join(missing)}")
    found = [m for name in sorted(lines) for m in mutants_of(name)
             if lines[name] is None or m.line in lines[name]]  # fmt: skip
    if arguments.sample:
        return sample(found, arguments.sample, arguments.seed)
    return [mutant for mutant in found if describe(mutant)]


def save(mutants: list[Mutant]) -> None:
    """Record the verdicts so far for ``--again``."""
    digests = {mutant.module: _digest(mutant.module) for mutant in mutants}
    record = {"digests": digests, "mutants": [asdict(mutant) for mutant in mutants]}
    (STATE / "results.json").write_text(json.dumps(record, indent=1), "utf-8")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/mutation_test.sh", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="modules; without: changed lines")
    parser.add_argument("--against", default="main", help="branch to compare with (main)")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="test files or folders")
    parser.add_argument("--deadline", type=float, default=120, metavar="SECONDS",
                        help="CPU time of the tests of one mutant (120)")  # fmt: skip
    parser.add_argument("--again", action="store_true",
                        help="the last run's mutants without those noticed")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    sys.path.append(str(PACKAGES))
    mutants = load(arguments.again, arguments)
    print(f"{len(mutants)} mutants", flush=True)
    if arguments.list or not mutants:
        print("\n".join(f"{m.module}:{m.line} {m.operator} {m.occurrence}" for m in mutants))
        return 0
    os.environ[MARK] = str(os.getpid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            importlib.import_module(name)
    try:
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            tree = Tree(Path(folder))
            choice = Choice(tree, arguments.tests, sorted({m.module for m in mutants}))
            choice.measure(limit=10 * arguments.deadline)
            _run_all(tree, choice, mutants, arguments.deadline)
    except KeyboardInterrupt:
        print("interrupted; --again goes on")
    print(report(mutants))
    return 0


def _run_all(tree: Tree, choice: Choice, mutants: list[Mutant], deadline: float) -> None:
    waiting = [mutant for mutant in mutants if mutant.verdict not in NOTICED]
    for number, mutant in enumerate(waiting, 1):
        begin = time.monotonic()
        tests, seconds = choice.tests_of(mutant, deadline)
        mutant.verdict = verdict(tree, mutant, tests, seconds)
        save(mutants)
        print(
            f"{number}/{len(waiting)} {mutant.verdict}: {mutant.module}:{mutant.line} "
            f"{mutant.operator} {mutant.occurrence} ({time.monotonic() - begin:.0f} s, "
            f"{len(tests)} test files)",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
