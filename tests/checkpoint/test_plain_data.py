"""Crafted checkpoints and indices: refused by name, and nothing of them runs."""

from __future__ import annotations

import argparse
import contextlib
import io
import pickle
import random
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.rerun_state_machine import RerunMode
from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.plain_data import only_plain_data
from megatron.dpp_train.checkpoint.reader import ARCHIVE, read_archive
from megatron.dpp_train.checkpoint.writers import bound_writers
from megatron.dpp_train.data import samples as data
from megatron.dpp_train.generate.model_source import find_source
from megatron.dpp_train.hf.checkpoint import Stored
from tests.checkpoint.small import Chunk, Job
from tests.harmful import Harmful

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PyTorch's, of its own formats

RULE = r"is not run: checkpoints and indices hold tensors, numbers and plain settings"
STATES = {
    "random": random.Random(1).getstate(), "numpy": numpy.random.RandomState(1).get_state(),
    "cpu": torch.arange(3), "mode": RerunMode.DISABLED, "count": numpy.float64(2), "none": None,
    "graphs": torch.Generator().manual_seed(3),
}  # fmt: skip


def request(states: Any) -> dict[str, Any]:
    tensor = torch.arange(4.0)
    return {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("weight", tensor),
            "states": ShardedObject("states", states, (1,), (0,)),
        },
        "args": argparse.Namespace(num_layers=1),
        "iteration": 3,
    }


@pytest.fixture(scope="module")
def whole(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one checkpoint."""
    root = tmp_path_factory.mktemp("whole")
    saved(root, STATES)
    return root


def saved(root: Path, states: Any) -> None:
    path = files.directory(root, 3)
    path.mkdir()
    with bound_writers(in_background=False):
        dist_checkpointing.save(request(states), str(path))
    files.write_tracker(root, 3)


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "root")
    return tmp_path / "root"


def loaded(monkeypatch: pytest.MonkeyPatch, root: Path) -> dict[str, Any]:
    """The state that a run with ``--load`` takes over."""
    job = Job(monkeypatch, root, load=str(root), no_load_optim=True, no_load_rng=True)
    job.chunks = [taker := Taker()]
    job.door.load()
    return {**taker.state, "iteration": job.run.iteration}


class Taker(Chunk):
    """A model that keeps what it is given."""

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        model: dict[str, Any] = request(None)["model"]
        return model

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_whole_states_are_loaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # has no effect here
    before = torch.load, pickle.load, set(torch.serialization.get_safe_globals())
    state = loaded(monkeypatch, root)
    assert before == (torch.load, pickle.load, set(torch.serialization.get_safe_globals()))
    assert torch.equal(state["weight"], torch.arange(4.0)) and state["iteration"] == 3
    found = state["states"]
    assert torch.equal(found.pop("graphs").get_state(), STATES["graphs"].get_state())
    assert str(found) == str({k: v for k, v in STATES.items() if k != "graphs"})
    assert found["mode"] is RerunMode.DISABLED
    random.Random().setstate(found["random"])
    numpy.random.RandomState().set_state(found["numpy"])


def craft_metadata(root: Path, made: Path) -> str:
    path = files.directory(root, 3) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Harmful(made)
    path.write_bytes(pickle.dumps(metadata))
    return r"iter_0000003/\.metadata"


def craft_common(root: Path, made: Path) -> str:
    path = files.directory(root, 3) / "common.pt"
    torch.save({"args": Harmful(made)}, path)
    return r"iter_0000003/common\.pt"


def craft_states(root: Path, made: Path) -> str:
    shutil.rmtree(root)
    root.mkdir()
    saved(root, Harmful(made))
    return r"iter_0000003/__0_\d\.distcp \(states/shard_0_1\)"


@pytest.mark.parametrize("craft", [craft_metadata, craft_common, craft_states])
@pytest.mark.parametrize("forced", [False, True])
def test_a_run_refuses_a_crafted_file_by_name(
    craft: Any, forced: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:  # PyTorch's own switch, which other programs may need
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    file = craft(root, tmp_path / "made")
    with pytest.raises(DataError, match=rf"{file}: asks for posix\.mkdir, which {RULE}") as error:
        loaded(monkeypatch, root)
    assert "\n" not in str(error.value) and not (tmp_path / "made").exists()


def test_crafted_metadata_is_refused_before_processes_start_and_by_convert_and_generate(
    root: Path, tmp_path: Path
) -> None:
    file = craft_metadata(root, tmp_path / "made")
    path = files.directory(root, 3)
    for read in (
        lambda: files.check_whole(files.Found(path, 3), 1, 1),
        lambda: Stored(path),
        lambda: find_source(root, None, "auto"),
    ):
        with pytest.raises(DataError, match=rf"{file}: asks for posix\.mkdir, which {RULE}"):
            read()
    assert not (tmp_path / "made").exists()


def test_convert_does_not_rely_on_the_check_before_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    craft_metadata(root, tmp_path / "made")
    monkeypatch.setattr(files, "check_whole", lambda *_: None)
    with pytest.raises(DataError, match=RULE):
        Stored(files.directory(root, 3))
    assert not (tmp_path / "made").exists()


def test_the_check_before_processes_refuses_nothing_that_a_rank_loads() -> None:
    """Whatever a rank's torch.load allows is a name that the launcher lets pass."""
    with only_plain_data("here"):
        allowed = {*_get_allowed_globals(), *_get_user_allowed_globals()}
    assert len(allowed) > 100 and {"argparse.Namespace", "numpy.ndarray"} < allowed
    assert [name for name in sorted(allowed) if not ARCHIVE.fullmatch(name)] == []


def test_the_check_before_processes_lets_transformer_engines_number_type_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized tensors name it. Nothing else of the compiled module may occur."""

    class Number:
        pass

    Number.__module__ = "transformer_engine_torch"
    for name in ("DType", "Other"):
        Number.__qualname__ = name
        module = SimpleNamespace(**{name: Number})
        monkeypatch.setitem(sys.modules, "transformer_engine_torch", module)
        torch.save({"iteration": 3, "type": Number()}, tmp_path / name)
    assert read_archive(tmp_path / "DType")["iteration"] == 3
    with pytest.raises(DataError, match=rf"transformer_engine_torch\.Other, which {RULE}"):
        read_archive(tmp_path / "Other")


def test_the_state_of_an_fp8_layer_is_plain_data(tmp_path: Path) -> None:
    """Transformer Engine unpickles it from the bytes of a tensor."""
    state = {"scale": torch.ones(2), "extra": {"number": 1, "type": torch.float32}}
    crafted = io.BytesIO()
    torch.save(Harmful(tmp_path / "made"), crafted)

    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (crafted.getvalue(),)

    with only_plain_data("here"):
        assert torch.equal(pickle.loads(pickle.dumps(state))["scale"], torch.ones(2))
        for harmful in (Harmful(tmp_path / "made"), Storage()):
            with pytest.raises(DataError, match=rf"here: asks for posix\.mkdir, which {RULE}"):
                pickle.loads(pickle.dumps(harmful))
    assert not (tmp_path / "made").exists()


def test_metadata_may_not_reach_torch_load(tmp_path: Path) -> None:
    """Its classes are those that run nothing, whoever loads it."""
    (tmp_path / ".metadata").write_bytes(b"ctorch.storage\n_load_from_bytes\n.")
    with pytest.raises(DataError, match=r"asks for torch\.storage\._load_from_bytes"):
        files.read_pickle(tmp_path / ".metadata")


class Builder:
    """Stands for megatron-core's builder, which reads an index as it does."""

    path = Path()

    def __init__(self, *_: Any) -> None:
        pass

    def build(self) -> Any:
        numpy.load(self.path, allow_pickle=True, mmap_mode="r")


@pytest.mark.parametrize("deferred", [False, True])
def test_an_index_is_an_array(
    deferred: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a-shuffle_index.npy"
    path.write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
    later = SimpleNamespace(datasets=[SimpleNamespace(path_to_shuffle_index=str(path))])
    monkeypatch.setattr(Builder, "path", path)
    if deferred:
        monkeypatch.setattr(Builder, "build", lambda _: (later, None, None))
    monkeypatch.setattr(data, "BlendedMegatronDatasetBuilder", Builder)
    monkeypatch.setattr(data, "num_samples", lambda _: [1])
    config = SimpleNamespace(defer_npy_index_mmap=deferred, fast_cache_load=True)
    run = SimpleNamespace(args=SimpleNamespace(data_path=["PREFIX"]))
    task = SimpleNamespace(datasets=lambda _: (None, config))
    rule = (
        r"pickled \(object\) data"
        if deferred
        else rf"shuffle_index\.npy: asks for posix\.mkdir, which {RULE}"
    )
    with pytest.raises(DataError, match=rule):
        data.build_iterators(run, 1, task)
    assert not (tmp_path / "made").exists()


def test_arrays_that_numpy_1_saved_are_loaded() -> None:
    content = io.BytesIO()
    saved = {"array": numpy.arange(3), "number": numpy.float64(2)}
    torch.save(saved, content, _use_new_zipfile_serialization=False)
    old = content.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    with only_plain_data("it"):
        assert str(torch.load(io.BytesIO(old))) == str(saved)


def test_numbers_of_every_numpy_type_are_loaded() -> None:
    """States of generators and of samplers hold them."""
    saved = [numpy.dtype(kind).type(1) for kind in "?bBhHiIlLqQefd"]
    content = io.BytesIO()
    torch.save(saved, content)
    with only_plain_data("it"):
        found = torch.load(io.BytesIO(content.getvalue()))
    assert found == saved and [one.dtype for one in found] == [one.dtype for one in saved]


def test_the_encoding_of_an_older_pickle_is_the_callers() -> None:
    """NumPy asks for ``latin1`` where Python 2 has written a file."""
    old = b"\x80\x02U\x01\xe9."  # its string of one byte
    with only_plain_data("it"):
        assert pickle.load(io.BytesIO(old), encoding="latin1") == "\xe9"
        assert pickle.loads(old, encoding="bytes") == b"\xe9"


def test_an_unreadable_file_is_named_by_its_whole_path(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"nothing")
    with path.open("rb") as file, only_plain_data("it"):
        for given in (file, path, str(path)):
            with pytest.raises(DataError) as error:
                torch.load(given)
            assert str(error.value).startswith(f"{path}: unreadable (")


def test_a_load_without_memory_does_not_blame_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(torch.OutOfMemoryError), only_plain_data("it"):
        torch.load("weights.pt")


@pytest.mark.parametrize("by_torch", [True, False])
def test_the_first_refusal_is_told_by_whatever_name_a_library_raises_it(by_torch: bool) -> None:
    """NumPy says only that it is no pickle."""

    harmful, hiding = Harmful(Path("made")), "Failed to interpret the file as a pickle"

    class Named(io.BytesIO):
        name = ""

    def refused(name: str) -> None:
        file = Named()
        if by_torch:
            torch.save(harmful, file)
        else:
            pickle.dump(harmful, file)
        file.name = name
        file.seek(0)
        with contextlib.suppress(DataError):
            (torch.load if by_torch else pickle.load)(file)

    def library() -> None:
        for name in ("the first", "the second"):
            refused(name)
        raise pickle.UnpicklingError(hiding)

    rule = rf"^the first: asks for posix\.mkdir, which {RULE}"
    with pytest.raises(DataError, match=rule), only_plain_data("it"):
        library()
    with pytest.raises(DataError, match=f"^it: .*{hiding}"), only_plain_data("it"):
        raise pickle.UnpicklingError(hiding)


def test_a_refusal_of_another_rank_is_told_and_other_failures_stay_as_they_are() -> None:
    """PyTorch gathers them by rank, each with its stack."""
    stack = traceback.StackSummary()
    broken: Any = {0: (ValueError("a bug"), stack)}
    other: Any = broken | {1: (DataError("file: asks for more"), stack)}
    with pytest.raises(CheckpointException) as error, only_plain_data("it"):
        raise CheckpointException("load", broken)
    assert error.value.failures is broken
    with pytest.raises(DataError, match=r"^file: asks for more$"), only_plain_data("it"):
        raise CheckpointException("load", other)


@pytest.mark.parametrize("known", [True, False])
def test_the_bytes_of_an_object_are_named_by_their_file_if_it_is_known(known: bool) -> None:
    """Other formats than PyTorch's have no table of files."""
    index = MetadataIndex("states/shard_0_1")
    item = SimpleNamespace(storage_index=index, dest_index=index)
    table = {index: SimpleNamespace(relative_path="__0_1.distcp")}
    planner: Any = DefaultLoadPlanner(flatten_state_dict=False)
    planner.metadata = SimpleNamespace(storage_data=table if known else None)
    planner.original_state_dict = planner.state_dict = {}
    content = io.BytesIO()
    torch.save(Harmful(Path("made")), content)
    content.seek(0)
    where = "iter_0000003/__0_1.distcp" if known else "iter_0000003/"
    with pytest.raises(DataError) as error, only_plain_data("iter_0000003"):
        planner.load_bytes(item, content)
    expected = f"{where} (states/shard_0_1): asks for posix.mkdir, which "
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("name", ["builtins.eval", "builtins.getattr", "os.system", "torch.load"])
def test_no_function_that_runs_what_it_is_given_is_called(name: str) -> None:
    module, _, function = name.rpartition(".")
    content = f"c{module}\n{function}\n(S'0'\ntR.".encode()
    rule = rf": asks for {name}, which {RULE}"
    with only_plain_data("it"):
        with pytest.raises(DataError, match=rule):
            pickle.loads(content)
        with pytest.raises(DataError, match=rule):
            pickle.load(io.BytesIO(content))


def test_a_member_of_an_enumeration_is_read_as_python_3_11_0_to_3_11_3_wrote_it() -> None:
    """Their pickles ask for ``getattr``: no checkpoint of Debian 12's Python could be loaded."""
    module = WriteItemType.__module__
    content = f"cbuiltins\ngetattr\n(c{module}\nWriteItemType\nS'SHARD'\ntR.".encode()
    with only_plain_data("it"):
        assert pickle.load(io.BytesIO(content)) is WriteItemType.SHARD
    other = b"cbuiltins\ngetattr\n(ccollections\nOrderedDict\nS'update'\ntR."
    with only_plain_data("it"), pytest.raises(DataError, match=r"asks for builtins\.getattr"):
        pickle.load(io.BytesIO(other))


def test_the_formats_of_numbers_that_an_fp8_layer_keeps_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also an array that NumPy 1 wrote in it."""
    recipe = ModuleType("transformer_engine.common.recipe")
    for parent in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)
    made = []
    for name in ("_FormatHelper", "Format", "MMParams", "QParams", "DelayedScaling"):
        kind = type(name, (), {"__module__": recipe.__name__})
        setattr(recipe, name, kind)
        made.append(kind())
    array = pickle.dumps(numpy.arange(3), protocol=2)
    with only_plain_data("it"):
        assert list(map(type, pickle.loads(pickle.dumps(made)))) == list(map(type, made))
        for module in (b"numpy._core.multiarray", b"numpy.core.multiarray"):
            old = array.replace(b"numpy._core.multiarray", module)
            assert pickle.loads(old).tolist() == [0, 1, 2]


def test_an_error_of_many_lines_is_told_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ValueError("broken\n" * 1000)

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(DataError) as error, only_plain_data("it"):
        torch.load("weights.pt")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
