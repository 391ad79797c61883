"""The dynamic pipeline enters processes that a host starts, by a variable or a flag of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launcher import REPOSITORY

FETCHES = """
import sys
{first}
loaded = sorted({{"torch", "megatron.core"}} & sys.modules.keys())
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
NAMED = "import megatron.dpp.autoload"
DYNAMIC = ["[] Plugin.run", "True"]
STATIC = ["[] forward_backward_no_pipelining", "False"]


def fetched(first: str = NAMED, then: str = "", python: str = sys.executable, **more: str) -> str:
    """The output of a process that fetches megatron-core's schedule."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DPP_")}
    path = os.pathsep.join([str(REPOSITORY), *sys.path])
    done = subprocess.run(
        [python, "-c", FETCHES.format(first=first, then=then)], cwd="/", capture_output=True,
        env={**environment, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **more}, text=True,
        timeout=170,
    )  # fmt: skip
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("value", "expected"), [("1", DYNAMIC), ("0", STATIC)])
def test_importing_the_module_is_enough_where_the_variable_is_set(
    value: str, expected: list[str]
) -> None:
    found = fetched(USE_DPP=value)
    assert [line.replace("DppSchedule", "Plugin") for line in found.splitlines()] == expected


def test_it_may_be_imported_after_megatron_core() -> None:
    assert fetched("", NAMED, USE_DPP="1").splitlines() == DYNAMIC


def test_a_bad_variable_is_an_error_that_names_it() -> None:
    assert "DPP_POLICY=fast" in fetched(USE_DPP="1", DPP_POLICY="fast")
    assert "USE_DPP=yes: expected 1 or 0" in fetched(USE_DPP="yes")


def test_a_host_calls_it_with_its_arguments() -> None:
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
    assert fetched("", called).splitlines()[:2] == ["[80, 7]", "None"]
    announced = fetched("", called, DPP_ANNOUNCE="1").splitlines()[1]
    assert announced.startswith("<function packed_lengths")
    assert "DPP_ANNOUNCE=maybe: expected 1 or 0" in fetched(USE_DPP="1", DPP_ANNOUNCE="maybe")


def test_the_command_writes_a_file_that_python_reads_at_its_start(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    python = str(tmp_path / "bin" / "python")

    def command(*words: str) -> str:
        return subprocess.run(
            [python, "-m", "megatron.dpp", "plugin", *words], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=60, check=True,
        ).stdout  # fmt: skip

    assert "not installed" in command()
    assert ": written." in command("--install-pth")
    assert ": installed" in command()
    assert fetched("", python=python, USE_DPP="1").splitlines() == DYNAMIC
    assert fetched("", python=python).splitlines() == STATIC
    assert ": removed" in command("--remove-pth") and "not installed" in command()
