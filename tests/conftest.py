"""Fixtures and skips that all tests share, and the path of the reference data.

A test marked ``gpu``, ``multigpu``, ``rdma`` or ``nixl`` is skipped with its reason where the
device or package is not there; ``DPP_REQUIRE=gpu,rdma`` (what ``tools/test.sh --gpu --rdma`` sets)
turns that skip into a failure. Tests without such a mark run as on a machine without a GPU. Tests
marked ``slow`` run with ``--long`` only.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from megatron.dpp.config import missing_part
from tests.runtime.launcher import has_gpu

REPOSITORY = Path(__file__).resolve().parents[1]
LONGEST = (
    "runtime/test_equality.py", "plugin/test_hosts.py", "runtime/test_expert_equality.py",
    "train/test_pretrain.py", "train/test_seed_commands.py", "hf/test_training.py",
    "train/test_rows.py", "plugin/hosts_like/test_hosts_like.py",
    "runtime/test_sliced_training.py", "runtime/test_race.py",
    "transport/test_cuda_fake.py", "runtime/test_host_changes.py", "runtime/test_te.py",
    "tools/test_setup.py", "plugin/test_autoload.py", "tools/test_bench_plugin.py",
    "report/test_analysis.py", "test_house.py",
)  # fmt: skip
"""Files of 7 s and more, longest first: where several processes share the suite, the last of them
to end should not have begun a long one late."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on the same examples each time, and with ``--long`` on others; how long
    one takes is the machine's affair."""
    settings.register_profile(
        "tests",
        deadline=None,
        derandomize=not config.getoption("--long"),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")
    gc.disable()  # until all tests are collected: next to nothing is garbage


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of several processes, which take files in this order
        tests = Path(__file__).parent
        places = {tests / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))
    reasons: dict[str, str | None] = {}
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        for marker, probe in _PROBES.items():
            if marker not in names:
                continue
            if marker not in reasons:
                reasons[marker] = probe(config)
            if reasons[marker] is not None:
                item.add_marker(_missing(marker, reasons[marker]))


def pytest_collection_finish() -> None:
    """Leaves what was imported and collected out of each later garbage collection, which takes a
    third of a second otherwise."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Lets Python's end find what is left, else modules in C++ report it as leaked."""
    gc.unfreeze()


def _missing(marker: str, reason: str) -> pytest.MarkDecorator:
    required = os.environ.get("DPP_REQUIRE", "").split(",")
    if marker in required:
        return pytest.mark.usefixtures("fail_for_missing_device")
    return pytest.mark.skip(reason=reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Shows this machine's GPUs to tests that are marked for them, and hides them from all others,
    their fixtures and their processes."""
    shown = any(item.get_closest_marker(name) for name in ("gpu", "multigpu"))
    with contextlib.nullcontext() if shown else without_gpus():
        return (yield)


@contextlib.contextmanager
def without_gpus() -> Iterator[None]:
    """PyTorch, and the processes that are started, find no GPU."""
    with contextlib.ExitStack() as stack:
        if has_gpu():  # first: it reads the variable
            import torch

            for name, value in (("is_available", False), ("device_count", 0)):
                stack.enter_context(mock.patch.object(torch.cuda, name, lambda value=value: value))
        stack.enter_context(mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}))
        yield


@pytest.fixture(autouse=True)
def environment_of_the_test() -> Iterator[None]:
    """Undoes what a test, or code that it calls, does to the environment: the processes of later
    tests would inherit it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def fail_for_missing_device() -> None:
    pytest.fail(f"DPP_REQUIRE={os.environ['DPP_REQUIRE']} asks for a device that is not here")


def _no_long(config: pytest.Config) -> str | None:
    return None if config.getoption("--long") else "slow: runs with --long"


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _no_gpu(_: pytest.Config) -> str | None:
    return None if _cuda_devices() >= 1 else "torch finds no CUDA device"


def _no_gpus(_: pytest.Config) -> str | None:
    found = _cuda_devices()
    return None if found >= 2 else f"needs 2 CUDA devices, torch finds {found}"


def _no_rdma(_: pytest.Config) -> str | None:
    devices = Path("/sys/class/infiniband")
    has_device = devices.is_dir() and any(devices.iterdir())
    return None if has_device else "no RDMA device in /sys/class/infiniband"


def _no_nixl(_: pytest.Config) -> str | None:
    return missing_part("nixl")


_PROBES: dict[str, Callable[[pytest.Config], str | None]] = {
    "slow": _no_long,
    "gpu": _no_gpu,
    "multigpu": _no_gpus,
    "rdma": _no_rdma,
    "nixl": _no_nixl,
}


@pytest.fixture(scope="session")
def reference() -> Path:
    """Folder with Megatron-LM's corpus, vocabularies and numbers; skips where it is absent."""
    default = REPOSITORY.parent / "shared" / "reference"
    folder = Path(os.environ.get("DPP_REFERENCE", default))
    if not (folder / "expected.json").is_file():
        pytest.skip(f"no reference data in {folder} (DPP_REFERENCE names another folder)")
    return folder
