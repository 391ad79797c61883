"""Mutation testing: puts small faults into a copy of the code, one at a time, and runs the tests.

``tools/mutation_test.sh`` calls it and documents it. The operators are those of cosmic-ray, for
C++ those of ``mutation_cpp.py``. Without ``--tests`` a module meets the tests of its room: those of
``tests/data`` for ``megatron/dpp_train/data``, and all where there is no such folder.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import mutation_cpp
import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = REPOSITORY / "build" / "mutation" / "packages"
"""cosmic-ray with its requirements; last in the path, as the environment's packages come first."""
MARK = "MUTATION_TEST_RUN"
REFUSED = "does not compile"
LEAST_SECONDS = 30.0
"""Time that tests have with a fault, beside four times what they take without."""


@dataclass
class Mutant:
    """One fault: an operator applied to one of the places that it fits."""

    module: str
    line: int
    operator: str
    occurrence: int
    position: tuple[int, ...]
    diff: str = ""
    verdict: str = ""


# Mutants ------------------------------------------------------------------------------------------


def mutants_of(module: str) -> Iterator[Mutant]:
    """All faults of a module, without their differences; annotations have none."""
    source = (REPOSITORY / module).read_text("utf-8")
    if is_cpp(module):
        for number, (name, start, end, _) in enumerate(mutation_cpp.faults_of(source)):
            yield Mutant(module, source.count("\n", 0, start) + 1, name, number, (start, end))
        return
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.commands.init import _operators

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
            yield Mutant(module, start[0], name, occurrence, (*start, *end))


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
    source = (REPOSITORY / mutant.module).read_text("utf-8")
    if is_cpp(mutant.module):
        _, start, end, instead = list(mutation_cpp.faults_of(source))[mutant.occurrence]
        return source[:start] + instead + source[end:]
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return str(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence))


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


# Runs ---------------------------------------------------------------------------------------------


class Tree:
    """A copy of the working tree, with the built extension, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds: dict[tuple[str, ...], float] = {}
        listed = _git("ls-files", "-co", "--exclude-standard", "-z").split("\0")
        built = [str(path.relative_to(REPOSITORY))
                 for pattern in ("megatron/dpp/**/*.so", "build/temp*/**/*.o")
                 for path in REPOSITORY.glob(pattern)]  # fmt: skip
        for name in filter(None, [*listed, *built]):
            if (REPOSITORY / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, folder / name)

    def verdict(self, mutant: Mutant, tests: tuple[str, ...]) -> str:
        """Put a fault in, run the tests, take it out again."""
        limit = LEAST_SECONDS + 4 * self._time(tests)
        path = self._folder / mutant.module
        original = path.read_text("utf-8")
        path.write_text(mutated(mutant), "utf-8")
        try:
            if is_cpp(mutant.module) and not mutation_cpp.build(self._folder):
                return REFUSED
            status = self._run(tests, limit)
        finally:
            path.write_text(original, "utf-8")
        if status is None:
            return "timed out"
        return "survived" if status == 0 else "killed"

    def _time(self, tests: tuple[str, ...]) -> float:
        """Seconds of the tests on unchanged code."""
        if tests not in self._seconds:
            begin = time.monotonic()
            if self._run(tests, None):
                raise SystemExit(f"mutation_test: error: {' '.join(tests)} fail on unchanged code")
            self._seconds[tests] = time.monotonic() - begin
        return self._seconds[tests]

    def _run(self, tests: tuple[str, ...], limit: float | None) -> int | None:
        """Pytest's exit status; None if it is not done within ``limit`` seconds. Ends all processes
        that are left of it."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            return subprocess.run(
                [*command, *tests], cwd=self._folder, timeout=limit, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_processes()


def _end_processes() -> None:
    """Kill what a test run has left, also in other sessions: all inherit the mark."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(os.getpid()):
                process.kill()
        except (psutil.Error, OSError):
            continue


def tests_of(module: str) -> tuple[str, ...]:
    """The tests of a module's room."""
    room = Path("tests", "transport" if is_cpp(module) else Path(module).parent.name)
    return (str(room if (REPOSITORY / room).is_dir() else "tests"),)


def report(mutants: list[Mutant]) -> str:
    """The table by module, and the differences that no test noticed."""
    mutants = [mutant for mutant in mutants if mutant.verdict != REFUSED]
    rows = [f"{'module':48} mutants  killed  timed out  survived  not run"]
    for module in [*sorted({mutant.module for mutant in mutants}), "all"]:
        verdicts = [mutant.verdict for mutant in mutants if module in (mutant.module, "all")]
        count = Counter(verdicts)
        rows.append(
            f"{module:48} {len(verdicts):7} {count['killed']:7} {count['timed out']:10} "
            f"{count['survived']:9} {count['']:8}"
        )
    survivors = [mutant for mutant in mutants if mutant.verdict == "survived"]
    rows += [f"\n{m.verdict}: {m.operator} {m.occurrence}\n{m.diff}" for m in survivors]
    return "\n".join(rows)


def choose(arguments: argparse.Namespace) -> list[Mutant]:
    """The mutants of a run."""
    lines: dict[str, set[int] | None] = dict(changed_lines(arguments.against))
    if arguments.files:
        lines = {str(Path(f).resolve().relative_to(REPOSITORY)): None for f in arguments.files}
    missing = [module for module in lines if not (REPOSITORY / module).is_file()]
    if missing:
        raise SystemExit(f"mutation_test: error: no such file: {', '.join(missing)}")
    found = [
        mutant
        for name, wanted in sorted(lines.items())
        for mutant in mutants_of(name)
        if wanted is None or mutant.line in wanted
    ]
    if arguments.sample:
        return sample(found, arguments.sample, arguments.seed)
    return [mutant for mutant in found if describe(mutant)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/mutation_test.sh", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="modules; without: changed lines")
    parser.add_argument("--against", default="main", help="branch to compare with (main)")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N places (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--tests", nargs="+", help="test files or folders (those of the room)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    arguments = parser.parse_args(argv)
    sys.path.append(str(PACKAGES))
    mutants = choose(arguments)
    print(f"{len(mutants)} mutants", flush=True)
    if arguments.list:
        print("\n".join(f"{m.module}:{m.line} {m.operator} {m.occurrence}" for m in mutants))
        return 0
    os.environ |= {MARK: str(os.getpid()), "PYTHONDONTWRITEBYTECODE": "1"}  # it would be stale
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            tree = Tree(Path(folder))
            for number, mutant in enumerate(mutants, 1):
                tests = tuple(arguments.tests or tests_of(mutant.module))
                mutant.verdict = tree.verdict(mutant, tests)
                where = f"{mutant.module}:{mutant.line} {mutant.operator} {mutant.occurrence}"
                print(f"{number}/{len(mutants)} {mutant.verdict}: {where}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(report(mutants))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
