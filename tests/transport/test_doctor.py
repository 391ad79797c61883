"""The doctor tells what is missing and what to do."""

from __future__ import annotations

import sys

import pytest

from megatron.dpp import doctor
from megatron.dpp.errors import TransportUnavailable


def test_every_probe_finds_something_and_all_is_well_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    for name in ("C++ extension", "shared memory", "locked memory", "GPUs", "RDMA"):
        assert name in printed


def test_a_missing_extension_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise TransportUnavailable("not there; build it with `python setup.py build_ext`")

    monkeypatch.setattr("megatron.dpp.transport.native.load_native", missing)
    assert doctor.main([]) == 1
    assert "setup.py build_ext" in capsys.readouterr().out


def test_without_pytorch_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert f"{sys.executable} has no PyTorch" in printed
    assert "bash tools/setup.sh" in printed
    assert "shared memory" in printed and "C++ extension" not in printed
