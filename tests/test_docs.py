"""The documentation is true of the tree: its commands parse, and what it names exists."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatron.dpp.__main__ import COMMANDS
from megatron.dpp.command_line import flag_of
from megatron.dpp.config import DppConfig, option_fields
from megatron.dpp.run import take_flags
from megatron.dpp_train.presets import checks, flag_table, options
from megatron.dpp_train.presets.flags import to_argv
from tests.sources import ROOT, text_of

PAGES = [
    *("README.md", "README_zh.md", "CONTRIBUTING.md", "SECURITY.md", "configs/README.md"),
    *(f"datasets_{arch}/README.md" for arch in ("bert", "gpt")),
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))),
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("examples/*/README.md"))),
]
SOURCES = "megatron profiling tools tests examples scripts csrc"
OTHER_PROGRAMS = {
    *("cd", "curl", "docker", "export", "git", "ibv_rc_pingpong", "ip", "jq", "kubectl", "ln"),
    *("mkdocs", "nvidia-cuda-mps-control", "pip", "pytest", "rping", "source", "srun", "sbatch"),
    *("trl", "vllm"),
}
"""Programs that are not ours."""
SCRIPTS = {"tools/preprocess_data.py": "preprocess", "profiling/aggregate.py": "aggregate"}
STARTS = ("megatron-dpp ", "torchrun ", "python ", "bash ")
"""Commands in blocks that name no language."""
FOLDERS = "configs|csrc|datasets_bert|datasets_gpt|docs|examples|megatron|profiling|tests|tools"
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./*-]+)`")
ABSENT = {"megatron/__init__.py", "examples/gpt3/train_gpt3_345m_distributed.sh"}
"""The file that must not exist, and one of the earlier projects."""
MODULE = re.compile(r"`(megatron\.dpp[\w.]*)`")
FLAG = re.compile(r"`(--[a-z][\w-]*)")
needs_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="Megatron's flags come from its training loop, which needs Python 3.12",
)


class Wrong(Exception):
    """The reason why a command of the documentation cannot run."""


class Parsed(BaseException):
    """A parser has accepted a command line; the command must not go on."""


def commands_of(page: str) -> Iterator[tuple[int, str]]:
    """Line and text of each command of a page's shell blocks."""
    block, command, first = None, "", 0
    for number, line in enumerate(text_of(page).splitlines(), 1):
        if line.startswith("```"):
            block = line[3:] if block is None else None
        elif block == "bash" or (block == "" and (command or line.startswith(STARTS))):
            first = first if command else number
            command += line.removesuffix("\\")
            if not line.endswith("\\"):
                plain = re.sub(r"(^|\s)(#|> ).*", "", command)
                yield from ((first, part.strip()) for part in re.split("; |&&", plain) if part)
                command = ""


def sources() -> str:
    """All source files as one text."""
    kinds = (".py", ".sh", ".cc", ".h")
    paths = [path for room in SOURCES.split() for path in (ROOT / room).rglob("*.*")]
    scripts = [*ROOT.glob("*.sh"), *ROOT.glob("*.py"), ROOT / "train"]
    paths = [path for path in (*paths, *scripts) if path.suffix in kinds or path.name == "train"]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())


@pytest.fixture(scope="module")
def code() -> str:
    return sources()


@pytest.fixture(scope="module")
def table() -> flag_table.Table:
    return flag_table.table()


def check(command: str, table: flag_table.Table, code: str) -> None:
    """Check one command with its variables.

    Raises:
        Wrong: it names something that does not exist.
    """
    words = shlex.split(command.replace("[", " ").replace("]", " "))
    while words and (assigned := re.match(r"([A-Z_]+)=", words[0])):
        if assigned[1] not in code:
            raise Wrong(f"unknown variable {assigned[1]}")
        words.pop(0)
    if not words or words[0] in OTHER_PROGRAMS or words[0] == "...":
        return
    program, *words = words
    if program == "nice":
        program, *words = words
    if program == "torchrun":
        at = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        program, words = "python", words[at:]
    if program.removeprefix("./") == "megatron-dpp":
        check_command(words, table)
    elif program in ("python", "python3") and words[0] == "-m":
        if words[1] in ("megatron.dpp", "megatron.dpp.run"):
            check_command([*words[1].split(".")[2:], *words[2:]], table)
        elif words[1].startswith("megatron") and importlib.util.find_spec(words[1]) is None:
            raise Wrong(f"unknown module {words[1]}")
    elif program in ("bash", "python", "python3"):
        check_script(words[0].removeprefix("./"), words[1:], table)
    else:
        check_script(program.removeprefix("./"), words, table)


def check_script(script: str, words: list[str], table: flag_table.Table) -> None:
    """A launch script's flags are those of the training script."""
    if not (ROOT / script).is_file():
        raise Wrong(f"no file {script}")
    if script in SCRIPTS:
        check_command([SCRIPTS[script], *words], table)
    elif script == "train" or script.startswith("scripts/"):
        check_command(["train", *words], table)
    elif script.startswith("profiling/"):
        check_benchmark(Path(script).stem, words)
    elif script.startswith("tools/"):
        if unknown := [w for w in words if w.startswith("--") and w not in text_of(script)]:
            raise Wrong(f"{script} has no option {unknown[0]}")
    elif not script.endswith("own_loop.py"):
        check_training([*words[_first_flag(words) :]], table)


def _first_flag(words: list[str]) -> int:
    return next((i for i, word in enumerate(words) if word.startswith("--")), len(words))


def check_training(words: list[str], table: flag_table.Table) -> None:
    if "..." not in words:
        checks.parse(words, table, options.NAMES)


def check_command(words: list[str], table: flag_table.Table) -> None:
    """A sub-command and its arguments."""
    if not words or words[0] in ("COMMAND", "--help", "--version"):
        return
    name, *given = words
    given = ["4" if re.fullmatch("[A-Z]", word) else word for word in given]
    if name not in COMMANDS:
        raise Wrong(f"no command megatron-dpp {name}")
    if not given or "--help" in given:
        return
    if name == "train":
        check_training(to_argv(options.parse(given)[1]), table)
    elif name == "run":  # a script of the user's, whose other flags are its own
        take_flags(given[1:], {})
    else:
        accepted(importlib.import_module(COMMANDS[name][0]).main, given)


def check_benchmark(name: str, words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "profiling")
        patched.setattr(sys, "argv", [f"{name}.py", *words])
        module = importlib.import_module(name)
        accepted(lambda _: getattr(module, "parse_arguments", module.main)(), [])


def accepted(main: Callable[[list[str]], Any], given: list[str]) -> None:
    """Calls ``main`` up to the moment when its parser has accepted the arguments."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(own: argparse.ArgumentParser, *what: Any) -> NoReturn:
        original(own, *what)
        raise Parsed

    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(Parsed):
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        main(given)
        raise Wrong("the command parsed nothing")


@needs_training
@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(
    page: str, table: flag_table.Table, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for line, command in commands_of(page):
        try:
            check(command, table, code)
        except SystemExit:
            said = capsys.readouterr().err.strip().splitlines()[-1:]
            wrong.append(f"{page}:{line}: {command}: {said}")
        except Exception as error:
            wrong.append(f"{page}:{line}: {command}: {error or error!r}")
    assert not wrong, "\n".join(wrong)


@needs_training
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("megatron-dpp nothing", "no command megatron-dpp nothing"),
        ("megatron-dpp train --mode 3d --nonsense", "--nonsense"),
        ("bash nowhere.sh", "no file nowhere.sh"),
        ("bash run_single_gpt.sh --nonsense", "--nonsense"),
        ("bash tools/test.sh --nonsense", "tools/test.sh has no option --nonsense"),
        ("NON_SENSE=1 bash run_single_gpt.sh", "unknown variable NON_SENSE"),
        ("torchrun -m megatron.dpp.run x.py --use-dpp --dpp-nonsense 1", "--dpp-nonsense"),
        ("python -m megatron.dpp.nothing", "unknown module megatron.dpp.nothing"),
        ("python profiling/bench_nothing.py", "no file profiling/bench_nothing.py"),
    ],
)
def test_wrong_commands_are_found(command: str, said: str, table: flag_table.Table) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        check(command, table, code="")


def test_named_files_modules_and_imports_exist() -> None:
    wrong = []
    for page in PAGES:
        text = text_of(page)
        names = [name for name in FILE.findall(text) if not re.search("[A-Z]{4}", name)]
        wrong += [f"{page}: {name}" for name in names
                  if name not in ABSENT and not list(ROOT.glob(name.rstrip("/")))]  # fmt: skip
        for name in MODULE.findall(text):
            path = ROOT.joinpath(*name.split("."))
            if not (path.is_dir() or path.with_suffix(".py").is_file()):
                wrong.append(f"{page}: {name}")
        for line in re.findall(r"^ *(from megatron\.dpp\S* import .+)$", text, re.M):
            exec(line, {})
    assert not wrong, "\n".join(wrong)


@needs_training
def test_named_flags_exist(table: flag_table.Table, code: str) -> None:
    known = {*table, *re.findall(r"--[a-z][\w-]*", code)}
    for names in re.findall(r"harness\.new_parser\((.*?)\n    \)", code, re.DOTALL):
        known |= {f"--{name}".replace("_", "-") for name in re.findall(r"(\w+)=", names)}
    wrong = [
        f"{page}: {flag}"
        for page in PAGES
        if not page.startswith("docs/decisions/")  # they also name what is gone
        for flag in FLAG.findall(text_of(page))
        if flag not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_links_of_the_readme_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", text_of("README.md"))
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


def test_the_first_page_names_every_command() -> None:
    section = text_of("docs/index.md").split("## The command")[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(COMMANDS)


def test_the_table_of_flags_has_every_setting_with_its_default() -> None:
    section = text_of("docs/flags.md").split("## Dynamic pipeline and transport")[1]
    cells = [line.split("|") for line in section.split("\n## ")[0].splitlines() if "| `--" in line]
    shown = {cell[1].split("`")[1]: cell[2].strip().strip("`") for cell in cells}
    words = {"True": "on", "False": "off", "None": ""}
    defaults = {flag_of(field.name): str(getattr(DppConfig(), field.name))
                for field in option_fields()}  # fmt: skip
    assert shown == {flag: words.get(text, text) for flag, text in defaults.items()}


def parts(page: str) -> tuple[list[str], list[tuple[list[str], list[str]]], list[str], int]:
    """Commands, names and numbers of tables, links, and the number of headings of a page."""
    text = text_of(page)
    blocks = [re.sub(r"\s+#.*", "", line) for _, line in commands_of(page)]
    rows = [re.sub(r"\]\([^)]*\)", "]", line) for line in text.splitlines() if line[:1] == "|"]
    names = [(sorted(re.findall(r"`[^`]+`", row)), sorted(re.findall(r"\d+(?:\.\d+)?", row)))
             for row in rows]  # fmt: skip
    links = set(re.findall(r"\]\(([^)#]+)\)", text)) - {"README.md", "README_zh.md"}
    return blocks, names, sorted(links), text.count("\n## ")


def test_both_readmes_say_the_same() -> None:
    for english, chinese in zip(parts("README.md"), parts("README_zh.md"), strict=True):
        assert english == chinese
