"""Rules that hold for all files of the repository. Each failure names file and line."""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.sources import ROOT, text_of, tree_of

MOST_FUNCTION_LINES = 60
MOST_FILE_LINES = 500
MOST_FILE_BYTES = 2 << 20

QUESTION = re.compile(
    r"(?:What|Whether|How|Why|Which|When|Where|Who|Is|Are|Does|Do|Were|Was|Can|Has|Have)\b"
)
BOOLEANS_OF_OTHERS = {
    "megatron/dpp_train/pretrain/bert.py: model_provider(pre_process)",
    "megatron/dpp_train/pretrain/bert.py: model_provider(post_process)",
    "megatron/dpp/core/wgrad/product.py: forward(allreduce_dgrad)",
}
"""Positional booleans that another library's signature asks for: Megatron's providers of models and
``torch.autograd.Function.forward``.
"""

CLOSED_DOCUMENTS = [
    f"{name}.md" for name in ("POLICY", "MEASURED", "TRANSPORT", "ARCHITECTURE", "HOUSE", "PROSE")
]
"""Documents that are not in the repository."""

MOST_PRIVATE = 27
"""Functions of tests that touch private members. Lower it where some are rewritten at a door."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tracked(*patterns: str) -> list[str]:
    """Tracked files that exist, relative to the repository; skips outside of a clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no clone: git lists no files")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def functions_of(name: str) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(name)) if isinstance(node, Function))


def test_no_docstring_opens_with_a_question_word() -> None:
    wrong = []
    for name in tracked("*.py"):
        for node in ast.walk(tree_of(name)):
            if not isinstance(node, ast.Module | ast.ClassDef | Function):
                continue
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if QUESTION.match(first):
                wrong.append(f"{name}:{node.body[0].lineno}: {first}")
    assert not wrong, "\n".join(wrong)


def code_blocks(text: str) -> Iterator[str]:
    """Indented blocks of a docstring that hold an import."""
    for block in re.split(r"\n(?=\S)", text):
        _, _, rest = block.partition("\n")
        code = textwrap.dedent(rest).strip("\n")
        if re.search(r"^from \S+ import |^import ", code, re.MULTILINE):
            yield code


def test_code_in_docstrings_is_python() -> None:
    """A comment that was wrapped once became a line of the front door's example."""
    found = 0
    for name in tracked("megatron/*.py"):
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                for code in code_blocks(ast.get_docstring(node) or ""):
                    compile(code, name, "exec")
                    found += 1
    assert found >= 2


def test_functions_are_short() -> None:
    wrong = []
    for name in tracked("*.py"):
        for node in functions_of(name):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                wrong.append(f"{name}:{node.lineno}: {node.name} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def cpp_functions(name: str) -> Iterator[tuple[int, int]]:
    """First line and length of each function body of a C++ file, as clang-format lays them out."""
    start, indent = 0, ""
    for number, line in enumerate(text_of(name).splitlines(), 1):
        head = re.match(r"( {0,2})[^\s#/}].*[)\w] \{$", line)
        kind = r" *(?:namespace|class|struct|enum|extern|union|if|for|while|switch|else|do|try)\b"
        if not start and head and not re.match(kind, line):
            start, indent = number, head[1]
        elif start and line.startswith(indent + "}"):
            yield start, number - start + 1
            start = 0


def test_functions_in_cpp_are_short() -> None:
    wrong = [
        f"{name}:{line}: a function of {length} lines"
        for name in tracked("csrc/*.cc", "csrc/*.h")
        for line, length in cpp_functions(name)
        if length > MOST_FUNCTION_LINES
    ]
    assert not wrong, "\n".join(wrong)


def test_files_that_are_taken_first_exist() -> None:
    assert {f"tests/{name}" for name in LONGEST} <= set(tracked("tests/*.py"))


def test_files_are_short() -> None:
    wrong = []
    for name in tracked("*.py", "csrc/*.cc", "csrc/*.h", "*.sh"):
        lines = text_of(name).count("\n")
        if lines > MOST_FILE_LINES:
            wrong.append(f"{name}:{lines}: the file has more than {MOST_FILE_LINES} lines")
    assert not wrong, "\n".join(wrong)


def test_tracked_files_are_small() -> None:
    """A wheel that came along with a commit would be in every clone."""
    assert [name for name in tracked() if (ROOT / name).stat().st_size > MOST_FILE_BYTES] == []


def lacks_encoding(call: ast.Call) -> bool:
    """True for a text file that is read or written in the locale's encoding."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if "encoding" in {each.arg for each in call.keywords}:
        return False
    if name == "open":
        words = [
            str(n.value) for a in call.args for n in ast.walk(a) if isinstance(n, ast.Constant)
        ]
        modes = [each for each in words if re.fullmatch("[rwxabt+]+", each)]
        return bool(modes or isinstance(call.func, ast.Name)) and "b" not in "".join(modes)
    most = {"read_text": 0, "write_text": 1}.get(name)
    return isinstance(call.func, ast.Attribute) and most is not None and len(call.args) <= most


def test_texts_are_read_and_written_in_utf8() -> None:
    wrong = [
        f"{name}:{node.lineno}: {ast.unparse(node.func)} without an encoding"
        for name in tracked("*.py")
        if not name.startswith("tests/")
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call) and lacks_encoding(node)
    ]
    assert not wrong, "\n".join(wrong)


def public_functions(scope: ast.AST) -> Iterator[Function]:
    """Functions and methods without an underscore, and the constructors of public classes."""
    is_public = isinstance(scope, ast.ClassDef) and not scope.name.startswith("_")
    for node in ast.iter_child_nodes(scope):
        is_constructor = isinstance(node, Function) and node.name == "__init__"
        if isinstance(node, Function) and (
            not node.name.startswith("_") or (is_constructor and is_public)
        ):
            yield node
        yield from public_functions(node)


def positional_booleans(function: Function) -> Iterator[str]:
    """Parameters before ``*`` that are annotated as booleans or have one as default."""
    positional = [*function.args.posonlyargs, *function.args.args]
    defaults = [None] * (len(positional) - len(function.args.defaults)) + function.args.defaults
    for parameter, default in zip(positional, defaults, strict=True):
        annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
        is_boolean = isinstance(default, ast.Constant) and isinstance(default.value, bool)
        if is_boolean or annotation in ("bool", "bool | None"):
            yield parameter.arg


def test_public_functions_take_booleans_by_keyword() -> None:
    wrong, met = [], set()
    for name in tracked("megatron/*.py"):
        for node in public_functions(tree_of(name)):
            for parameter in positional_booleans(node):
                place = f"{name}: {node.name}({parameter})"
                met.add(place)
                if place not in BOOLEANS_OF_OTHERS:
                    wrong.append(f"{name}:{node.lineno}: {node.name}({parameter})")
    assert not wrong, "\n".join(wrong)
    assert met == BOOLEANS_OF_OTHERS, "an exception is needed no more"


def test_every_document_that_is_named_can_be_opened() -> None:
    own = Path(__file__).relative_to(ROOT).as_posix()
    closed = re.compile("|".join(rf"\b{re.escape(name)}" for name in CLOSED_DOCUMENTS))
    wrong = []
    for name in tracked():
        if name == own:
            continue
        try:
            lines = text_of(name).splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        wrong += [f"{name}:{i}: {line}" for i, line in enumerate(lines, 1) if closed.search(line)]
    assert not wrong, "\n".join(wrong)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


@cache
def private_names() -> frozenset[str]:
    """Private names that files of the two packages, the tools and the benchmarks define."""
    found = set()
    for name in tracked("megatron/*.py", "tools/*.py", "profiling/*.py"):
        for node in ast.walk(tree_of(name)):
            if isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return frozenset(filter(is_private, found))


def foreign_modules(tree: ast.Module) -> set[str]:
    """Names of other packages' modules in a file, as ``import`` binds them."""
    aliases = [each for node in tree.body if isinstance(node, ast.Import) for each in node.names]
    names = {each.asname or each.name.partition(".")[0]: each.name for each in aliases}
    return {name for name, whole in names.items() if whole.partition(".")[0] != "megatron"}


def root_of(node: ast.AST) -> str:
    """The name in front of an attribute."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def touches(node: ast.AST, foreign: set[str]) -> bool:
    """True for a private attribute, or the text of one that is patched."""
    if isinstance(node, ast.Attribute):
        return node.attr in private_names() and root_of(node) not in {*foreign, "self", "cls"}
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "patch", "object")):
        texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        private = any(text.rpartition(".")[2] in private_names() for text in texts)
        return private and not (node.args and root_of(node.args[0]) in foreign)
    return False


def test_few_tests_touch_private_members() -> None:
    """Tests stand at doors, so that what is behind them can change."""
    found = []
    for name in tracked("tests/*.py"):
        foreign = foreign_modules(tree_of(name))
        for node in functions_of(name):
            if any(touches(each, foreign) for each in ast.walk(node)):
                found.append(f"{name}:{node.lineno}: {node.name}")
    assert len(found) <= MOST_PRIVATE, "\n".join([f"{len(found)} functions:", *found])
