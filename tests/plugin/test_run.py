"""``megatron-dpp run``: flags, variables, and a script that runs as it would by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.command_line import dpp_config, flag_of
from megatron.dpp.config import DppConfig, option_fields
from megatron.dpp.errors import ConfigError, TransportError
from megatron.dpp.run import main, take_flags
from tests.runtime.launcher import REPOSITORY

SCRIPT = """
import sys
from megatron.core.pipeline_parallel import get_forward_backward_func
print(sys.argv[1:], __name__, get_forward_backward_func.__qualname__)
import beside
sys.exit(beside.STATUS)
"""


def test_our_flags_are_taken_out_and_the_rest_keeps_its_order() -> None:
    words = "--lr 1e-3 --use-dpp -x --dpp-slots 4 --data-path a b --no-dpp-task-rng --bf16"
    given, rest = take_flags(words.split(), {})
    assert " ".join(rest) == "--lr 1e-3 -x --data-path a b --bf16"
    assert given.use_dpp and not given.dpp_strict
    assert dpp_config(given) == DppConfig(slots=4, task_rng=False)


@pytest.mark.parametrize("field", option_fields(), ids=lambda field: field.name)
def test_every_setting_is_a_variable_and_a_flag_wins(field: object) -> None:
    name, default = field.name, field.default  # type: ignore[attr-defined]
    flag = flag_of(name)
    if isinstance(default, bool):
        given, _ = take_flags([], {f"DPP_{name.upper()}": "off" if default else "1"})
        assert getattr(given, f"dpp_{name}") is not default
        winner = flag if default else flag.replace("--", "--no-", 1)
        given, _ = take_flags([winner], {f"DPP_{name.upper()}": "0" if default else "1"})
        assert getattr(given, f"dpp_{name}") is default
        return
    kind = str if default is None else type(default)
    given, _ = take_flags([], {f"DPP_{name.upper()}": "5"})
    assert getattr(given, f"dpp_{name}") == kind("5")
    given, _ = take_flags([flag, "6"], {f"DPP_{name.upper()}": "5"})
    assert getattr(given, f"dpp_{name}") == kind("6")


def test_the_dynamic_pipeline_has_a_variable() -> None:
    assert take_flags([], {"USE_DPP": "1", "DPP_STRICT": "true"})[0].dpp_strict
    assert not take_flags([], {"USE_DPP": "0"})[0].use_dpp


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--dpp-polcy", "x"], {}, r"unknown flag --dpp-polcy \(did you mean --dpp-policy\?\)"),
        (["--no-dpp-rng"], {}, r"unknown flag --no-dpp-rng \(did you mean --no-dpp-task-rng\?\)"),
        (["--dpp-slots", "two"], {}, "--dpp-slots: invalid int value: 'two'"),
        ([], {"DPP_SLOTS": "two"}, "--dpp-slots: invalid int value: 'two'"),
        ([], {"USE_DPP": "perhaps"}, "USE_DPP=perhaps: expected 1 or 0"),
    ],
)
def test_bad_flags_and_variables_are_refused_in_one_line(
    words: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^.*{message}$"):
        take_flags(words, environment)


def test_flags_without_the_dynamic_pipeline_are_named_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    take_flags(["--dpp-slots", "3", "--dpp-checksum"], {})
    take_flags(["--dpp-slots", "3"], {"RANK": "1"})
    wanted = "megatron-dpp run: warning: without --use-dpp no effect: --dpp-slots, --dpp-checksum\n"
    assert capsys.readouterr().err == wanted


def test_the_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(flag_of(field.name) in shown for field in option_fields())


@pytest.fixture
def script(tmp_path: Path) -> str:
    """One that must not run."""
    path = tmp_path / "script.py"
    path.write_text("raise AssertionError")
    return str(path)


def test_a_missing_script_and_a_bad_setting_end_with_2(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2
    assert main(["nowhere.py"]) == 2
    assert main([script, "--use-dpp", "--dpp-policy", "best"]) == 2
    error = capsys.readouterr().err
    assert "nowhere.py: no such script" in error and "--dpp-policy best: expected one of" in error


def test_a_refusal_names_the_variable_that_gave_the_setting(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPP_SLOTS", "0")
    assert main([script, "--use-dpp"]) == 2
    assert capsys.readouterr().err.startswith(
        "megatron-dpp run: error: DPP_SLOTS=0: must be from 1 to "
    )
    assert main([script, "--use-dpp", "--dpp-slots", "-1"]) == 2
    assert capsys.readouterr().err.startswith(
        "megatron-dpp run: error: --dpp-slots -1: must be from 1 to "
    )


def test_an_error_inside_of_a_script_names_flags(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = ("from megatron.dpp.errors import TransportError, setting",)
    script.write_text("\n".join([*lines, "raise TransportError(setting('timeout'))"]))
    with pytest.raises(TransportError, match=r"^--dpp-timeout$"):
        main([str(script)])


def write_script(folder: Path) -> str:
    (folder / "beside.py").write_text("STATUS = 7")
    (folder / "script.py").write_text(SCRIPT)
    return str(folder / "script.py")


def test_a_script_runs_as_it_would_by_itself(tmp_path: Path) -> None:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "megatron.dpp.run", write_script(tmp_path), "--own", "--use-dpp"],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore",
             "TORCHDYNAMO_DISABLE": "1"},  # the import of PyTorch's compiler takes a second
        capture_output=True, text=True,
    )  # fmt: skip
    said = "['--own'] __main__ Plugin.get\n"
    assert (done.returncode, done.stdout) == (7, said), done.stderr


def test_a_script_without_our_flags_has_its_own_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main([write_script(tmp_path), "--own"])
    assert ended.value.code == 7 and sys.modules.pop("beside").STATUS == 7
    assert capsys.readouterr().out == "['--own'] __main__ get_forward_backward_func\n"


def test_a_trace_has_flags_and_variables() -> None:
    asked = ["--dpp-trace-dir", "here"]
    given, rest = take_flags([*asked, "--trace", "1"], {"DPP_TRACE": "1", "USE_DPP": "1"})
    assert given.dpp_trace and given.dpp_trace_dir == "here" and rest == ["--trace", "1"]
    given, _ = take_flags([], {"DPP_TRACE_ONLY": "on", "DPP_TRACE_INTERVAL": "3"})
    assert given.dpp_trace_only and given.dpp_trace_interval == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use-dpp", "--dpp-trace-only"], "--dpp-trace-only records the script's own schedule"),
        (["--dpp-trace-only", "--dpp-trace-interval", "0"], "--dpp-trace-interval 0: must be at"),
        (["--dpp-trace-only", "--dpp-trace-iterations", "x"], "--dpp-trace-iterations: iterations"),
    ],
)
def test_a_bad_trace_ends_with_2(
    script: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([script, *words]) == 2
    assert capsys.readouterr().err.startswith(f"megatron-dpp run: error: {message}")


def test_a_trace_without_the_dynamic_pipeline_names_the_other_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    take_flags(["--dpp-trace-only", "--dpp-trace-dir", "here"], {})
    assert capsys.readouterr().err == ""
    take_flags(["--dpp-trace"], {})
    assert capsys.readouterr().err == (
        "megatron-dpp run: warning: without --use-dpp no effect: --dpp-trace "
        "(--dpp-trace-only records the script's own schedule)\n"
    )
