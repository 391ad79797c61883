"""The command line of ``train``: the guide's commands, its help and completion."""

from __future__ import annotations

import errno
import re
import subprocess
from pathlib import Path

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.launch import cli
from megatron.dpp_train.launch.flags import from_argv, read_flags, to_argv
from megatron.dpp_train.launch.main import main, plan
from megatron.dpp_train.options.arguments import build_parser
from megatron.dpp_train.options.fields import core_fields
from tests.launch.test_train import ROOT


def guide_commands() -> list[str]:
    """The guide's commands of several nodes, without what is set before them."""
    text = (ROOT / "docs" / "USAGE_GUIDE.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0] for line in text.splitlines()]
    starts = ("NUM_NODES", "srun", "megatron-dpp train")
    found = [line.partition("train ")[2] for line in lines if line.startswith(starts)]
    return sorted({words for words in found if "--gpus" in words})


@pytest.mark.parametrize("words", guide_commands())
def test_the_guides_commands_resolve(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    rest = words.split()
    assert plan([*rest, "--gpu", "H200", *([] if "--dry-run" in rest else ["--dry-run"])]).nodes


@pytest.mark.parametrize("mode", [None, *cli.MODES])
def test_help_fits_a_screen(mode: str | None) -> None:
    lines = cli.help_text(mode).splitlines()
    assert len(lines) <= 40
    assert max(len(line) for line in lines) <= 100


def test_help_knows_every_option() -> None:
    names = {name for action in cli.build_parser()._actions for name in action.option_strings} - {
        "--mode",
        "--num-gpus",  # another name of --gpus
    }
    shown = "\n".join(cli.help_text(mode) for mode in cli.MODES)
    assert all(f" {name}" in shown for name in names)
    taken = {row["name"] for rows in core_fields().values() for row in rows}
    assert not {"tp", "pp", "chunks", "mode"} & taken


@pytest.mark.parametrize("mode", cli.MODES)
def test_fine_tuning_is_found_from_help(mode: str) -> None:
    """The flags that it needs stand in each mode's help, exist, and the last line says more."""
    *lines, last = cli.help_text(mode).splitlines()
    shown = set(re.findall(r"--[\w-]+", "\n".join(lines)))
    wanted = "--sft --load-hf --save-hf --variable-length --packing --overlong --trace"
    wanted += " --save-interval --metrics-file"
    assert set(wanted.split()) <= shown
    assert shown <= {*cli.NAMES, *build_parser()._option_string_actions, "--num-gpus"}
    assert "pretrain_gpt.py --help" in last and "docs/fine-tune.md" in last
    assert "--sft" in cli.help_text() and cli.help_text().endswith(last)
    assert build_parser().format_help().rstrip().endswith("docs/training.md")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_knows_every_option(shell: str) -> None:
    pytest.importorskip("shtab")
    script = cli.completion(shell)
    assert all(name.lstrip("-") in script for name in cli.NAMES)
    with pytest.raises(ConfigError, match="csh: nearest possible: bash, zsh, fish, tcsh"):
        cli.completion("csh")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("train --mod", {"--mode", "--model"}),
        ("train --mode m", {"megatron"}),
        ("python train --resu", {"--resume-from"}),
        ("python train --gpu H", {"H100", "H20", "H200", "H800"}),
        ("megatron-dpp train --resu", {"--resume-from"}),
        ("megatron-dpp plan --mod", set()),
        ("python script --mod", set()),
    ],
)
def test_bash_completes_options_and_values(line: str, found: set[str]) -> None:
    pytest.importorskip("shtab")
    words = line.split()
    which = "_shtab_train" if words[0] == "train" else "_train_behind_command"
    code = f"""{cli.completion("bash")}
COMP_WORDS=({line}) COMP_CWORD={len(words) - 1}
{which} {words[0]} {words[-1]} {words[-2]}
echo "${{COMPREPLY[@]}}"
"""
    shown = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert set(shown.stdout.split()) == found


def test_flags_survive_the_way_to_words_and_back() -> None:
    flags = {"--a": True, "--b": "1", "--c": ["1", "2"]}
    assert from_argv(to_argv(flags)) == flags
    assert from_argv(["--b=1"]) == {"--b": "1"}


def test_an_estimate_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``train`` prints the estimate only in a dry run; otherwise the run prints it."""
    started: list[bool] = []
    monkeypatch.setattr(
        "megatron.dpp_train.launch.main.find_python", lambda words, dry_run: "python"
    )
    monkeypatch.setattr(
        "megatron.dpp_train.launch.main.launch", lambda *args, dry_run: started.append(not dry_run)
    )
    for more, by_us in (([], False), (["--dry-run"], True)):
        main(["--mode", "zero", "--procs", "1", "--mock-data", *more])
        out = capsys.readouterr().out
        assert ("per rank" in out) == by_us
        assert out.startswith("mode zero\n") and "warning: there is one replica" in out
    assert started == [True, False]


def test_a_zero_of_a_file_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("eval-iters: 0\ntrace: false\nseed:\nlr: 0.0\n")
    assert read_flags(tmp_path / "run.yaml") == {"--eval-iters": 0, "--lr": 0.0}


def test_a_file_that_may_not_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of another user was a traceback."""

    def plan(_: list[str]) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/theirs/checkpoint")

    monkeypatch.setattr("megatron.dpp_train.launch.main.plan", plan)
    assert main(["--mode", "simple", "--load", "/theirs/checkpoint"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("error: [Errno 13] Permission denied: '/theirs/checkpoint'\n")
    assert said.count("\n") == 1
