"""The commands that the documentation shows exist, and take the arguments that it gives them.

Each command is parsed by its own parser, in this process. Nothing is started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatron.dpp.__main__ import COMMANDS
from megatron.dpp.run import take_flags
from megatron.dpp_train.launch import cli
from megatron.dpp_train.options import arguments
from megatron.dpp_train.options.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *("README.md", "README_zh.md", "CONTRIBUTING.md", "SECURITY.md", "configs/README.md"),
    *(f"datasets_{arch}/README.md" for arch in ("bert", "gpt")),
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))),
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("examples/*/README.md"))),
]
OTHER_VARIABLES = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "DS_BUILD_OPS"}
"""Variables of programs that are not ours."""
OTHER_PROGRAMS = {
    "curl",
    "docker",
    "export",
    "ibv_rc_pingpong",
    "jq",
    "lm_eval",
    "ln",
    "nvidia-cuda-mps-control",
    "rping",
    "source",
    "trl",
    "vllm",
}
WRAPPERS = {"nice", "sbatch", "srun"}
"""Programs that start the command behind their own arguments."""
SCRIPT_COMMANDS = {
    "tools/preprocess_data.py": "preprocess",
    "profiling/aggregate.py": "aggregate",
}
STARTS = ("megatron-dpp ", "torchrun ")
"""Commands in blocks that name no language."""
SPAN = re.compile(
    r"`((?:[A-Z_]+=\S+ )*(?:\./)?"
    r"(?:megatron-dpp|bash|python3?|torchrun|pretrain_\w+\.py|tools/\w+\.sh) [^`]+)`"
)
"""A command in a sentence."""


def commands_of(page: str) -> Iterator[tuple[int, str]]:
    """Line and text of each command: of shell blocks, and those in backticks in sentences."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    block, command, first = None, "", 0
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            block = line[3:] if block is None else None
        elif block == "bash" or (block == "" and (command or line.startswith(STARTS))):
            first = first if command else number
            command += line.removesuffix("\\")
            if not line.endswith("\\"):
                yield from ((first, each) for each in split(command))
                command = ""
        elif block is None:
            yield from ((number, each) for span in SPAN.findall(line) for each in split(span))


def split(line: str) -> Iterator[str]:
    """The commands of a line without comment and redirection."""
    plain = re.sub(r"(^|\s)(#|> ).*", "", line)
    yield from filter(None, (each.strip() for each in plain.split("; ")))


class Parsed(BaseException):
    """A parser has accepted a command line; the command must not go on."""


class Wrong(Exception):
    """The reason why a command of the documentation cannot run."""


def check(command: str) -> None:
    """Check one command with its variables.

    Raises:
        Wrong: it names something that does not exist.
    """
    words = shlex.split(command.replace("[", " ").replace("]", " "))
    while words and (assigned := re.match(r"([A-Z_]+)=", words[0])):
        if assigned[1] not in VARIABLES.keys() | OTHER_VARIABLES:
            raise Wrong(f"unknown variable {assigned[1]}")
        words.pop(0)
    if words and words[0] not in OTHER_PROGRAMS:
        check_program(words[0].removeprefix("./"), words[1:])


def check_program(program: str, words: list[str]) -> None:
    if program in WRAPPERS:
        at = next(i for i, word in enumerate(words) if "." in word or word == "megatron-dpp")
        check_program(words[at], words[at + 1 :])
    elif program == "megatron-dpp":
        check_command(words)
    elif program == "kubectl":
        files = [word for word in words if "/" in word]
        if missing := [name for name in files if not (ROOT / name).is_file()]:
            raise Wrong(f"no file {missing[0]}")
    elif program in ("python", "python3", "/usr/bin/python3") and words[0] == "-m":
        check_module(words[1], words[2:])
    elif program in ("bash", "python", "python3"):
        check_script(words[0], words[1:])
    elif program == "torchrun" and "-m" in words:
        at = words.index("-m")
        check_module(words[at + 1], words[at + 2 :])
    elif program == "torchrun":
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        check_script(words[at], words[at + 1 :])
    elif "." in program:
        check_script(program, words)
    else:
        raise Wrong(f"unknown program {program}")


def check_module(module: str, words: list[str]) -> None:
    if module in ("megatron.dpp", "megatron.dpp.run"):
        check_command([*module.split(".")[2:], *words])
    elif module.partition(".")[0] == "megatron" and importlib.util.find_spec(module) is None:
        raise Wrong(f"unknown module {module}")


def check_script(script: str, words: list[str]) -> None:
    """A shell script's flags are those of the training script, but for the tools' own."""
    if not (ROOT / script).is_file():
        raise Wrong(f"no file {script}")
    if script in SCRIPT_COMMANDS:
        check_command([SCRIPT_COMMANDS[script], *words])
    elif script.startswith("tools/"):
        text = (ROOT / script).read_text(encoding="utf-8")
        if unknown := [word for word in words if word.startswith("--") and word not in text]:
            raise Wrong(f"{script} has no option {unknown[0]}")
    elif script == "train":
        check_command(["train", *words])
    elif not script.endswith("own_loop.py"):
        at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        parse_training(words[at:])


def check_command(words: list[str]) -> None:
    """A sub-command and its arguments."""
    if not words or words[0] in ("COMMAND", "--help", "--version"):
        return
    name, given = words[0], filled(words[1:])
    if name not in COMMANDS:
        raise Wrong(f"no command megatron-dpp {name}")
    if not given:
        return  # a sentence names the command
    if {"--help", "--completion"} & set(given):
        if "--mode" in given:
            cli.help_text(given[given.index("--mode") + 1])
    elif name == "train":
        parse_training(cli.parse(given)[1])
    elif name == "run":  # a script of the user's, whose other flags are its own
        take_flags(given[1:], {})
    elif name == "bench":
        check_benchmark(given)
    elif name == "estimate":
        module = importlib.import_module("megatron.dpp_train.launch.estimate_command")
        parser = module.build_parser("megatron-dpp estimate")
        parse_training(parser.parse_known_args(given)[1])
    else:
        accepted(importlib.import_module(COMMANDS[name][0]).main, given)


def check_benchmark(given: list[str]) -> None:
    if not given or given[0] == "NAME":
        return
    name = f"bench_{given[0].replace('-', '_')}"
    if not (ROOT / "profiling" / f"{name}.py").is_file():
        raise Wrong(f"no benchmark {given[0]}")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "profiling")
        patched.setattr(sys, "argv", [f"{name}.py", *given[1:]])
        module = importlib.import_module(name)
        accepted(lambda _: getattr(module, "parse_arguments", module.main)(), [])
    torch = sys.modules.get("torch")
    if torch is not None and torch.overrides._get_current_function_mode_stack():
        raise Wrong(f"bench_{given[0]}.py stands in for CUDA before its arguments are read")


def filled(words: Sequence[str]) -> list[str]:
    """Words with a number for each placeholder of one letter."""
    return ["4" if re.fullmatch("[A-Z]", word) else word for word in words]


def parse_training(words: Sequence[str]) -> None:
    if words and words[0] != "...":
        arguments.parse_args(filled(words))


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


FOLDERS = "configs csrc datasets_bert datasets_gpt docs examples megatron profiling tests tools"
PLACEHOLDER = re.compile(r"[A-Z]{4}")
ABSENT = {"megatron/__init__.py", "examples/gpt3/train_gpt3_345m_distributed.sh"}
"""The file that must not exist, and one of the earlier projects."""
FILE = re.compile(rf"`((?:{FOLDERS.replace(' ', '|')})/[\w./*-]+)`")
MODULE = re.compile(r"`(megatron\.dpp[\w.]*)`")
FLAG = re.compile(r"`(--[a-z][\w-]*)")


def known_flags() -> set[str]:
    """Flags of the training scripts, and those that our other sources name."""
    found = {name for action in arguments.build_parser()._actions for name in action.option_strings}
    folders = (ROOT / "megatron", ROOT / "profiling", ROOT / "tools", ROOT / "tests")
    for path in (path for folder in folders for path in folder.rglob("*.*") if path.is_file()):
        if path.suffix in (".py", ".sh"):
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r"--[a-z][\w-]*", text))
            for options in re.findall(r"harness\.new_parser\((.*?)\n    \)", text, re.DOTALL):
                found |= {f"--{name}".replace("_", "-") for name in re.findall(r"(\w+)=", options)}
    return found


def test_named_files_and_modules_exist() -> None:
    wrong = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        names = [name for name in FILE.findall(text) if not PLACEHOLDER.search(name)]
        names = [name for name in names if name not in ABSENT]
        wrong += [f"{page}: {name}" for name in names if not list(ROOT.glob(name.rstrip("/")))]
        for name in MODULE.findall(text):
            path = ROOT.joinpath(*name.split("."))
            if not (path.is_dir() or path.with_suffix(".py").is_file()):
                wrong.append(f"{page}: {name}")
    assert not wrong, "\n".join(wrong)


def test_no_usual_change_needs_more_than_three_files_of_code() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("| a new |")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| [")]
    assert len(rows) == 10
    for _, change, code, *_ in rows:
        title, anchor = re.findall(r"\[(.+)\]\(#(.+)\)", change)[0]
        assert f"###-{anchor}\n" in text.lower().replace(" ", "-"), title
        assert len(code.split(",")) <= 3, title


def test_named_imports_exist() -> None:
    line = re.compile(r"^ *(from megatron\.dpp\S* import .+)$", re.M)
    texts = ((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    found = [each for text in texts for each in line.findall(text)]
    assert found
    for each in found:
        exec(each, {})


def test_the_first_page_names_every_command() -> None:
    table = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split("## The command")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(COMMANDS)


def test_named_flags_exist() -> None:
    known = known_flags()
    wrong = [
        f"{page}: {flag}"
        for page in PAGES
        if not page.startswith("docs/decisions/")  # they also name what was not done
        for flag in FLAG.findall((ROOT / page).read_text(encoding="utf-8"))
        if flag not in known
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for line, command in commands_of(page):
        try:
            check(command)
        except SystemExit:
            said = capsys.readouterr().err.strip().splitlines()[-1:]
            wrong.append(f"{page}:{line}: {command}: {said}")
        except Exception as error:
            wrong.append(f"{page}:{line}: {command}: {error or error!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("megatron-dpp nothing", "no command megatron-dpp nothing"),
        ("megatron-dpp train --mode 3d --nonsense", "--nonsense"),
        ("bash nowhere.sh", "no file nowhere.sh"),
        ("bash run_single_gpt.sh --nonsense", "--nonsense"),
        ("bash tools/test.sh --nonsense", "tools/test.sh has no option --nonsense"),
        ("NONSENSE=1 bash run_single_gpt.sh", "unknown variable NONSENSE"),
        ("torchrun -m megatron.dpp.run x.py --use-dpp --dpp-nonsense 1", "--dpp-nonsense"),
        ("python -m megatron.dpp.nothing", "unknown module megatron.dpp.nothing"),
        ("megatron-dpp bench nothing", "no benchmark nothing"),
    ],
)
def test_wrong_commands_are_found(command: str, said: str) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        check(command)


def test_flags_of_parsers_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("megatron-dpp sim --nonsense", "megatron-dpp bench schedule --nonsense"):
        with pytest.raises(SystemExit):
            check(command)
        assert "--nonsense" in capsys.readouterr().err
