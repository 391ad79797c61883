"""tools/setup.sh, run for real in a small repository whose extension is one text file."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setup_environment
from setup_environment import Environment, SetupFailed

from megatron.dpp import doctor

ROOT = Path(__file__).resolve().parents[2]
NO_OTHER = {"HOME": "/nowhere", "PYENV_ROOT": "/nowhere", "CONDA_EXE": "/nowhere/bin/conda"}
"""Hides the Pythons of this user's folders."""
SETUP_PY = """
import pathlib, sysconfig
name = "_native" + sysconfig.get_config_var("EXT_SUFFIX")
pathlib.Path("megatron/dpp", name).write_text(pathlib.Path("csrc/a.cc").read_text())
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("tools", "csrc", "megatron/dpp"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("setup.sh", "setup_environment.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    (tmp_path / "csrc" / "a.cc").write_text("one")
    (tmp_path / "setup.py").write_text(SETUP_PY)
    (tmp_path / "requirements.txt").write_text("# comment\ntorch>=2.6\nnumpy>=1.26\n")
    return tmp_path


def set_up(repository: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repository / "tools" / "setup.sh")],
        env={**os.environ, "PYTHON": sys.executable, **NO_OTHER, **settings},
        capture_output=True,
        text=True,
        timeout=150,
    )


def built(repository: Path) -> str:
    (path,) = (repository / "megatron" / "dpp").glob("_native*.so")
    return path.read_text()


def test_only_what_is_missing_is_built(repository: Path) -> None:
    first = set_up(repository)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == sys.executable
    assert "built the extension" in first.stderr
    assert built(repository) == "one"
    tools = repository / "bin"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    second = set_up(repository, PATH=str(tools))  # without a compiler
    assert "nothing to do" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    (repository / "csrc" / "a.cc").write_text("two")
    assert "built the extension" in set_up(repository).stderr
    assert built(repository) == "two"
    next((repository / "megatron" / "dpp").glob("_native*.so")).unlink()
    assert "built the extension" in set_up(repository).stderr
    assert built(repository) == "two"


def test_a_failed_build_shows_its_end_and_is_tried_again(repository: Path) -> None:
    (repository / "setup.py").write_text("raise SystemExit('no such header: x.h')")
    for _ in range(2):
        result = set_up(repository)
        assert result.returncode == 2
        assert "the C++ extension could not be built" in result.stderr
        assert "no such header: x.h" in result.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CXX", "no-such-compiler", "no C++ compiler: 'no-such-compiler' is not in PATH"),
        ("PYTHON", "no-such-python", "'no-such-python' is not there"),
    ],
)
def test_what_is_not_there_is_said_at_once(
    repository: Path, name: str, value: str, said: str
) -> None:
    result = set_up(repository, **{name: value})
    assert result.returncode == 2
    assert said in result.stderr
    assert not (repository / "build" / "setup.log").exists()


def test_an_empty_compiler_is_none_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``CXX=`` counts as unset, in the doctor too."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    for empty in ("", " "):
        monkeypatch.setenv("CXX", empty)
        setup_environment.check_compiler(environment())
        assert doctor.probe_compiler().text == "/usr/bin/g++"


def put_python3(repository: Path, text: str) -> str:
    """A PATH whose python3 is this script, with what set-up itself needs."""
    tools = repository / "bin"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    (tools / "python3").write_text(f"#!{shutil.which('bash')}\n{text}\n")
    (tools / "python3").chmod(0o755)
    return str(tools)


@pytest.mark.parametrize(
    "place",
    [
        "bin/python3.12",
        "home/.pyenv/versions/3.12.1/bin/python3",
        "home/miniconda3/envs/a/bin/python3",
        "conda/bin/python3",
    ],
)
def test_a_new_python_is_found_beside_an_old_one(place: str, repository: Path) -> None:
    """``python3`` of PATH is a shim that fails."""
    if sys.version_info < (3, 12):
        pytest.skip("finds Pythons of 3.12 and newer")
    path = put_python3(repository, "exit 127")
    conda = f"{repository}/conda/bin/conda"
    found = repository / place
    found.parent.mkdir(parents=True, exist_ok=True)
    found.symlink_to(sys.executable)
    ran = subprocess.run(
        [str(shutil.which("bash")), str(repository / "tools" / "setup.sh"), "--which"],
        env={"PATH": path, "HOME": f"{repository}/home", "CONDA_EXE": conda},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).name.startswith("python3")


def test_an_interpreter_is_kept_under_any_name_and_locale(repository: Path) -> None:
    """Python cannot print or write the bytes of some names in some encodings."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("these tests run outside of a virtual environment")
    link = Path(os.fsdecode(os.fsencode(repository) + "/\u6a21".encode() + b"\xff"))
    link.symlink_to(sys.prefix)
    named = os.fsencode(link / "bin" / "python")
    command = ["bash", str(repository / "tools" / "setup.sh")]
    env = os.environb | {b"PYTHON": named, b"PYTHONIOENCODING": b"gbk"}
    env |= {b"LC_ALL": b"C", b"PYTHONUTF8": b"0", b"PYTHONCOERCECLOCALE": b"0"}
    for words in (["--which"], []):
        ran = subprocess.run([*command, *words], env=env, capture_output=True, timeout=150)
        assert ran.stdout.strip() == named, ran.stderr
    kept = (repository / "build" / "python").read_bytes().strip()
    assert kept == named.removeprefix(os.fsencode(repository) + b"/")


def plain_python(folder: Path) -> str:
    """An interpreter that is no virtual environment and has no PyTorch."""
    base = Path(sys.base_prefix) / "bin" / "python3"
    if not base.is_file() or sys.prefix == sys.base_prefix:
        pytest.skip("these tests run outside of a virtual environment")
    (folder / "plain").write_text(f'#!/bin/sh\nexec {base} -S "$@"\n')
    (folder / "plain").chmod(0o755)
    return f'exec {folder / "plain"} "$@"'


def which(repository: Path, **settings: str) -> str:
    ran = subprocess.run(
        ["bash", str(repository / "tools" / "setup.sh"), "--which"],
        env={**os.environ, **settings}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_one_rule_says_which_python_starts(repository: Path) -> None:
    """PYTHON, else the active environment with PyTorch, else the one that set-up used first, else
    python3 of PATH."""
    path = put_python3(repository, "exit 1")
    assert "no Python 3.12 or newer was found" in set_up(repository, PYTHON="", PATH=path).stderr
    base, python3 = Path(sys.base_prefix) / "bin", repository / "bin" / "python3"
    python3.write_text(f"#!{shutil.which('bash')}\n{plain_python(repository)}\n")
    assert Path(which(repository, PYTHON="", PATH=path)).parent == base
    assert set_up(repository).returncode == 0  # with PYTHON: kept
    assert which(repository, PYTHON="", PATH=path) == sys.executable
    assert Path(which(repository, PYTHON=str(base / "python3"), PATH=path)).parent == base
    kept = repository / "build" / "python"
    kept.write_text("bin/python3\n")  # of this clone
    assert Path(which(repository, PYTHON="", PATH=path)).parent == base
    kept.unlink()
    venv = repository / ".venv" / "bin" / "python"
    venv.parent.mkdir(parents=True)
    venv.symlink_to(sys.executable)
    assert Path(which(repository, PYTHON="", PATH=path)) == venv
    kept.write_text("/no/such/python\n")
    assert Path(which(repository, PYTHON="", PATH=path)) == venv
    active = f"{Path(sys.executable).parent}:{path}"
    assert Path(which(repository, PYTHON="", PATH=active)).parent == Path(sys.executable).parent


def test_the_first_set_up_is_kept_and_an_active_environment_is_not(repository: Path) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("these tests run outside of a virtual environment")
    kept = repository / "build" / "python"
    active = {"PYTHON": "", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert set_up(repository, **active).returncode == 0
    first = kept.read_text()
    assert Path(first.strip()).is_file()
    kept.write_text("bin/other\n")
    put_python3(repository, "exit 1")
    (repository / "bin" / "other").symlink_to("python3")
    assert set_up(repository, **active).returncode == 0
    assert kept.read_text() == "bin/other\n"


def test_a_second_user_may_not_enter_the_folder_of_the_kept_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback of PermissionError."""
    kept, shut, real = tmp_path / "kept", "/shut/bin/python", os.stat
    kept.write_text(f"{shut}\n")

    def stat(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(setup_environment, "KEPT", kept)
    monkeypatch.setattr(setup_environment, "VENV_PYTHON", Path("/shut/venv/python"))
    monkeypatch.setattr(setup_environment, "describe", lambda files: environment(torch=None))
    assert not setup_environment.has_kept()
    with pytest.raises(SetupFailed, match=rf"this user may not run {shut}.* PYTHON="):
        setup_environment.check_ready([], PermissionError(13, "Permission denied"), anew=False)


def test_a_clone_that_cannot_be_written_to_is_used_when_all_is_there(repository: Path) -> None:
    """A read-only file system is fine if nothing has to be done."""
    set_up(repository)
    lock = repository / "build" / "setup.lock"
    lock.unlink()
    lock.mkdir()  # which cannot be opened, by root neither
    result = set_up(repository)
    assert (result.returncode, result.stdout.strip()) == (0, sys.executable)
    assert "nothing to do" in result.stderr
    (repository / "csrc" / "a.cc").write_text("two")
    result = set_up(repository)
    assert result.returncode == 2
    why = "Is a directory, and set-up has to build the C++ extension"
    reason = f"setup.sh: error: set-up: {lock}: {why}"
    assert result.stderr.startswith(reason)
    assert len(result.stderr.splitlines()) == 1


def test_two_at_once_take_turns(repository: Path) -> None:
    (repository / "build").mkdir()
    with (repository / "build" / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            ["bash", str(repository / "tools" / "setup.sh")],
            env={**os.environ, "PYTHON": sys.executable},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert process.stderr is not None
        assert "waiting for another set-up" in process.stderr.readline()
    _, rest = process.communicate(timeout=150)
    assert process.returncode == 0
    assert "built the extension" in rest


def environment(**changes: object) -> Environment:
    fields = {
        "python": sys.executable,
        "extension_suffix": ".so",
        "has_headers": True,
        "is_writable": True,
        "torch": "2.11.0+cu130",
        "missing": [],
    }
    return Environment(**{**fields, **changes})


def test_a_users_pytorch_is_never_replaced() -> None:
    with pytest.raises(SetupFailed, match=r"PyTorch 2\.1\.0 .* replaces no PyTorch"):
        setup_environment.install(environment(torch="2.1.0", missing=["torch>=2.6"]))


def test_installing_holds_the_users_versions_and_takes_pytorch_where_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup_environment, "BUILD", tmp_path)
    monkeypatch.setattr(setup_environment, "run_shown", lambda command, _: commands.append(command))
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.org/cpu")
    setup_environment.install(environment(missing=["tqdm>=4"]))
    setup_environment.install(environment(torch=None, missing=["torch>=2.6"]))
    first, torch = commands
    assert first[-1] == "tqdm>=4"
    assert torch[-3:] == ["torch==2.13.0", "--index-url", "https://example.org/cpu"]
    constraints = Path(first[first.index("--constraint") + 1]).read_text()
    assert "\nnumpy==" in "\n" + constraints
    assert "\ntorch==" in "\n" + constraints


def test_pips_progress_is_shown_and_a_failure_points_to_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    shows = "import sys; print('Downloading torch'); sys.exit(int(sys.argv[1]))"
    setup_environment.run_shown([sys.executable, "-c", shows, "0"], "pip could not")
    out, err = capfd.readouterr()
    assert not out and err == "Downloading torch\n"
    with pytest.raises(SetupFailed, match=r"pip could not; pip says why above, and in .*log"):
        setup_environment.run_shown([sys.executable, "-c", shows, "1"], "pip could not")


def test_an_environment_that_must_not_be_written_to_gets_a_venv_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    at_hand = environment(is_writable=False, missing=["tqdm>=4"])
    monkeypatch.setattr(setup_environment, "VENV_PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(setup_environment, "KEPT", tmp_path / "build" / "python")
    monkeypatch.setattr(setup_environment, "describe", lambda _: at_hand)
    monkeypatch.setattr(setup_environment, "inspect", lambda python, _: environment(python=python))
    monkeypatch.setattr(
        setup_environment, "run_logged", lambda command, _: commands.append(command)
    )
    chosen, done = setup_environment.choose_environment(["requirements.txt"], anew=True)
    assert chosen.python == str(tmp_path / ".venv" / "bin" / "python")
    assert done == ["made .venv"]
    assert commands[0][-1] == "--system-site-packages"


def test_a_kept_choice_lasts_until_another_set_up_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, seen, old = tmp_path / "python", [], f"{tmp_path / 'python'}\n"
    kept.write_text(old)  # a path that is there, and may be run
    kept.chmod(0o755)
    monkeypatch.setattr(setup_environment, "KEPT", kept)
    monkeypatch.setattr(setup_environment, "extension_is_stale", lambda _: False)
    monkeypatch.setattr(setup_environment, "describe", lambda _: environment(python="/new/python"))
    monkeypatch.setattr(setup_environment, "inspect", lambda python, _: environment(python=python))

    def install(_: Environment) -> list[str]:
        seen.append(kept.read_text())
        if len(seen) == 1:
            raise SetupFailed("no index")
        return []

    monkeypatch.setattr(setup_environment, "install", install)
    with pytest.raises(SetupFailed, match="no index"):
        setup_environment.set_up([], anew=True)
    assert kept.read_text() == old
    setup_environment.set_up([], anew=False)
    assert kept.read_text() == old
    setup_environment.set_up([], anew=True)
    assert seen == [old] * 3  # another start may read it at any time
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("python", "/new/python\n")
    ]


def test_a_named_interpreter_without_pytorch_does_not_lead_to_the_kept_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, of in (("KEPT", tmp_path / "kept"), ("VENV_PYTHON", tmp_path / "venv")):
        of.write_text(sys.executable)
        of.chmod(0o755)
        monkeypatch.setattr(setup_environment, name, of)
    monkeypatch.setattr(setup_environment, "inspect", lambda python, _: environment(python=python))
    for anew, python in ((False, sys.executable), (True, str(tmp_path / "venv"))):
        found = setup_environment.existing_environment(environment(torch=None), [], anew=anew)
        assert found is not None and found.python == python


def test_the_suite_loads_no_plug_in_of_the_environment(tmp_path: Path) -> None:
    """One that warns, as pytest-benchmark does under pytest-xdist, ended it."""
    (tmp_path / "loud.py").write_text("import warnings\nwarnings.warn('a plug-in of others')\n")
    metadata = tmp_path / "loud-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nloud = loud\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", __file__],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["setup_environment.py", "make_sample_data.py"])
def test_tools_run_without_docstrings(name: str) -> None:
    """``PYTHONOPTIMIZE=2`` ended the first command of a clone by a traceback."""
    script = Path(setup_environment.__file__).with_name(name)
    done = subprocess.run([sys.executable, "-OO", str(script), "--help"], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_setup_works_where_nothing_can_be_said(repository: Path) -> None:
    """A line into a closed or full standard error ended it without a word."""
    for where in ("2>&-", "2>/dev/full"):
        code = f"PYTHON={sys.executable} bash {repository}/tools/setup.sh {where}"
        done = subprocess.run(["bash", "-c", code], stdout=subprocess.PIPE, text=True, timeout=150)
        assert (done.returncode, done.stdout.strip()) == (0, sys.executable), where


@pytest.mark.parametrize(
    "command", ["bash run_single_gpt.sh", "./megatron-dpp doctor", "./train --dry-run"]
)
def test_a_foreign_package_of_the_same_name_is_refused(tmp_path: Path, command: str) -> None:
    """With Megatron-DeepSpeed in PYTHONPATH there was "no module named megatron.dpp"."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "DRY_RUN": "1"}
    done = subprocess.run(
        command.split(), env=env, cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 2
    said = f": {tmp_path}/megatron has an __init__.py, which hides this project and megatron-core: "
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
