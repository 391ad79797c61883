"""The dynamic pipeline enters processes that a host starts, by a variable or a flag of the host."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from megatron.dpp.doctor import main as doctor
from tests.runtime.launcher import REPOSITORY

FETCHES = """
import sys
{first}
loaded = sorted({{"torch", "megatron.core"}} & sys.modules.keys() - already)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel import schedules
{then}
assert get_forward_backward_func is schedules.get_forward_backward_func
print(loaded, get_forward_backward_func(1, None).__qualname__)
assert get_forward_backward_func(1, None) == schedules.get_forward_backward_func(1, None)
from megatron.dpp import plugin
print(plugin.is_installed())
"""
"""A host that imports the function by name, before it is called."""
FORKS = """
import os, sys, traceback
import megatron.core.pipeline_parallel
already = {"torch", "megatron.core"}
for name in [name for name in sys.modules if name.startswith(f"{megatron.core.__name__}.pipe")]:
    del sys.modules[name]
while asked := sys.stdin.readline():
    code, environment = eval(asked)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.environ.update(environment)
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        print(repr(said.read()), flush=True)
    os.wait()
"""
"""A process that has imported megatron-core but for its schedules, which takes seconds, and forks
one for each host."""
NAMED = "import megatron.dpp.autoload"
DYNAMIC = ["[] Plugin.run", "True"]
STATIC = ["[] forward_backward_no_pipelining", "False"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a host, without the test's own settings and without PyTorch's compiler,
    whose import takes a second."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("DPP_")}
    path = os.pathsep.join([str(REPOSITORY), *sys.path])
    quick = {"TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    return {**own, "PYTHONPATH": path, **quick, **more}


def fresh(code: str, python: str = sys.executable, **more: str) -> str:
    """The output of a process of its own."""
    done = subprocess.run(
        [python, "-c", f"already = set()\n{code}"], cwd="/", capture_output=True,
        env=environment(**more), text=True, timeout=170,
    )  # fmt: skip
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


class Fetched(Protocol):
    """Gives the lines of a process that fetches megatron-core's schedule."""

    def __call__(self, first: str = NAMED, then: str = "", **more: str) -> list[str]: ...


@pytest.fixture(scope="module")
def fetched() -> Iterator[Fetched]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], cwd="/", env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        ask, answer = server.stdin, server.stdout

        def of(first: str = NAMED, then: str = "", **more: str) -> list[str]:
            ask.write(repr((FETCHES.format(first=first, then=then), more)) + "\n")
            ask.flush()
            said: str = ast.literal_eval(answer.readline())
            return said.splitlines()

        yield of
        ask.close()


def test_a_process_that_asks_for_no_schedule_loads_nothing_for_it() -> None:
    code = f"import sys\n{NAMED}\nprint({{'torch', 'megatron.core'}} & sys.modules.keys())"
    assert fresh(code, USE_DPP="1") == "set()\n"


@pytest.mark.parametrize(("value", "expected"), [("1", DYNAMIC), ("0", STATIC)])
def test_importing_the_module_is_enough_where_the_variable_is_set(
    fetched: Fetched, value: str, expected: list[str]
) -> None:
    assert fetched(USE_DPP=value) == expected


def test_it_may_be_imported_after_megatron_core(fetched: Fetched) -> None:
    assert fetched("", NAMED, USE_DPP="1") == DYNAMIC


def test_a_bad_variable_is_an_error_that_names_it(fetched: Fetched) -> None:
    assert "DPP_POLICY=fast" in fetched(USE_DPP="1", DPP_POLICY="fast")[-1]
    assert "USE_DPP=yes: expected 1 or 0" in fresh(NAMED, USE_DPP="yes")


def test_a_host_calls_it_with_its_arguments(fetched: Fetched) -> None:
    """slime's and miles' ``--custom-megatron-init-path``: the bound of a microbatch is theirs."""
    called = (
        "import os; from types import SimpleNamespace as N; from unittest.mock import patch\n"
        "from megatron.dpp import autoload, plugin\n"
        "with patch.object(plugin, 'install') as install:\n"
        "    for given in ({}, {'DPP_MAX_TOKENS': '7'}, {'USE_DPP': '0'}):\n"
        "        with patch.dict(os.environ, given):\n"
        "            autoload.megatron_init(N(max_tokens_per_gpu=40, context_parallel_size=2))\n"
        "print([call.kwargs['config'].max_tokens for call in install.call_args_list])\n"
        "print(install.call_args.kwargs['lengths'])"
    )
    assert fetched("", called)[:2] == ["[80, 7]", "None"]
    announced = fetched("", called, DPP_ANNOUNCE="1")[1]
    assert announced.startswith("<function packed_lengths")
    assert "DPP_ANNOUNCE=maybe: expected 1 or 0" in fetched(USE_DPP="1", DPP_ANNOUNCE="maybe")[-1]


def test_the_command_writes_a_file_that_python_reads_at_its_start(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = str(tmp_path / "bin" / "python")

    def command(*words: str) -> str:
        return subprocess.run(
            [python, "-m", "megatron.dpp", "doctor", *words], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=60, check=True,
        ).stdout  # fmt: skip

    assert "on: processes" in command("--enable-plugin")
    fetches = FETCHES.format(first="", then="")
    assert fresh(fetches, python, USE_DPP="1").splitlines() == DYNAMIC
    assert fresh("import sys; print('megatron.dpp' in sys.modules)", python) == "False\n"
    for _ in range(2):
        assert "off: no" in command("--disable-plugin")


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk left an empty file, without which the plugin is off."""
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert doctor(["--enable-plugin"]) == 0
    (file,) = tmp_path.iterdir()
    whole, before = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert doctor(["--enable-plugin"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "--enable-plugin: " in (said := capsys.readouterr().err) and "python -m venv" in said
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [whole]
