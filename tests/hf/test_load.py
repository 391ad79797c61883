"""``--load-hf`` uses every tensor of a folder, ``--save-hf`` writes a trained model only."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron.dpp.errors import DataError
from megatron.dpp_train.families import find_families
from megatron.dpp_train.hf import Entry, Sizes, entries
from megatron.dpp_train.hf import load as hf

FAMILIES = find_families()
_SIZES = Sizes(
    layers=4,
    hidden=32,
    ffn=48,
    heads=4,
    groups=2,
    head=8,
    vocab=96,
    positions=64,
    experts=0,
    expert_ffn=48,
    untied=False,
)


@pytest.mark.parametrize(
    ("family", "key"), [("qwen2", "linear_qkv.bias"), ("qwen3", "q_layernorm")]
)
def test_tensors_that_no_rank_used_are_refused(family: str, key: str) -> None:
    tensors = list(entries(FAMILIES[family], _SIZES))
    used = {(each.key, each.place) for each in tensors if not each.twin}
    hf.check_all_used(Path("folder"), tensors, used)
    less = {(name, place) for name, place in used if key not in name}
    assert less < used
    with pytest.raises(DataError, match=r"--load-hf folder: .* no place for model\.layers\.0\."):
        hf.check_all_used(Path("folder"), tensors, less)


def test_a_norm_with_two_names_needs_one_of_them() -> None:
    tensors = list(entries(FAMILIES["mixtral"], replace(_SIZES, experts=4)))
    once = {(each.key, each.place) for each in tensors if not each.twin}
    assert len(once) == len(tensors) - _SIZES.layers
    hf.check_all_used(Path("folder"), tensors, once)


def test_shards_are_those_of_data_and_context_ranks_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def group(*, with_context_parallel: bool) -> str:
        return "data and context" if with_context_parallel else "data"

    def state(metadata: dict[str, Any]) -> dict[str, Any]:
        asked.append(metadata["dp_cp_group"])
        return {}

    asked: list[str] = []
    folder = SimpleNamespace(
        entries=list, path="folder", config=SimpleNamespace(family="llama"), dtype="bf16"
    )  # fmt: skip
    monkeypatch.setattr(hf, "Folder", lambda *_: folder)
    monkeypatch.setattr(hf.mpu, "get_data_parallel_group", group)
    monkeypatch.setattr(hf.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(hf.dist, "all_gather_object", lambda every, own: every.__setitem__(0, own))
    run: Any = SimpleNamespace(
        args=SimpleNamespace(load_hf="folder", family_file=None), say=lambda text: None
    )
    hf.fill(run, [SimpleNamespace(sharded_state_dict=state)] * 2)
    assert asked == ["data and context"] * 2


def folder_of_numbers(family: str = "llama", sizes: Sizes = _SIZES) -> Any:
    """A folder whose tensors hold their layer's number, and a half more in each next part."""

    def read(entry: Entry) -> list[torch.Tensor]:
        first = float(sum(entry.place))
        return [torch.full(part.shape, first + i / 2) for i, part in enumerate(entry.parts)]

    return SimpleNamespace(
        entries=lambda: entries(FAMILIES[family], sizes), path="folder", read=read, dtype="bf16",
        config=SimpleNamespace(family=family, sizes=sizes),
    )  # fmt: skip


def fill_alone(
    monkeypatch: pytest.MonkeyPatch, states: list[dict[str, Any]], folder: Any = None
) -> set[Any]:
    """Fill these chunks on the only rank; what of the folder it used."""
    used: list[set[Any]] = []
    monkeypatch.setattr(hf, "Folder", lambda *_: folder or folder_of_numbers())
    monkeypatch.setattr(hf.mpu, "get_data_parallel_group", lambda **_: None)
    monkeypatch.setattr(hf.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(hf.dist, "all_gather_object", lambda every, own: every.__setitem__(0, own))
    monkeypatch.setattr(hf, "check_all_used", lambda path, left, found: used.append(found))
    run: Any = SimpleNamespace(
        args=SimpleNamespace(load_hf="folder", family_file=None), say=lambda text: None
    )
    hf.fill(run, [SimpleNamespace(sharded_state_dict=lambda metadata, s=s: s) for s in states])
    return used[0]


def test_each_layer_of_each_chunk_is_filled_with_its_own_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also gates and their products, which are one parameter and two shards."""
    words = "embedding.word_embeddings.weight"
    down, gated = (f"decoder.layers.mlp.linear_{part}.weight" for part in ("fc2", "fc1"))
    chunks, parameters = [], []
    for layer in (1, 3):
        own = [torch.nn.Parameter(torch.ones(shape)) for shape in ((32, 48), (96, 32))]
        place = (0, layer, 4)
        shards = [
            ShardedTensor.from_rank_offsets(key, data, place, prepend_axis_num=1)
            for key, data in zip((down, gated), own, strict=True)
        ]
        halves = apply_swiglu_sharded_factory(shards[1], (place,))
        chunks.append({"down": shards[0], "gated": halves, "kept": {"other": "state"}})
        parameters.append((float(layer), *own))
    embedding = torch.ones(96, 32)
    chunks[0]["words"] = ShardedTensor.from_rank_offsets(words, embedding)
    used = fill_alone(monkeypatch, chunks)
    assert used == {(key, (layer,)) for key in (down, gated) for layer in (1, 3)} | {(words, ())}
    assert not embedding.any()
    for number, filled, both in parameters:
        assert set(filled.unique().tolist()) == {number}
        expected = torch.tensor([number] * 48 + [number + 0.5] * 48)
        assert torch.equal(both, expected[:, None].expand(96, 32))


@pytest.mark.parametrize("key", ["decoder.final_layernorm.bias", "decoder.layers.mlp.router.bias"])
def test_a_parameter_that_the_folder_lacks_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep its random values."""
    shard = ShardedTensor.from_rank_offsets(key, torch.zeros(32))
    with pytest.raises(DataError, match=f"--load-hf folder: its model has no {key}"):
        fill_alone(monkeypatch, [{"one": shard}])


def shard_of(key: str, *shape: int) -> Any:
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, float("nan")))


WORDS, NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("key", "shape", "fits"),
    [(WORDS, (96, 32), True), (WORDS, (102, 32), True), (WORDS, (95, 32), False),
     (NORM, (32,), True), (NORM, (96,), False), (NORM, (102,), False)],
)  # fmt: skip
def test_only_a_vocabulary_may_be_longer_than_the_folders(
    key: str, shape: tuple[int, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of others would be left as zeros."""
    refusal = pytest.raises(DataError, match=r"is \[(96, )?32\], the run's model has ")
    with contextlib.nullcontext() if fits else refusal:
        fill_alone(monkeypatch, [{"one": shard_of(key, *shape)}])


@pytest.mark.parametrize("experts", [0, 4, 8])
def test_a_model_with_another_number_of_layers_or_experts_is_refused(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of two layers, and those of 4 and 8 experts; there are four of both."""
    folder = folder_of_numbers("mixtral", replace(_SIZES, experts=4))
    key = next(each.key for each in folder.entries() if len(each.counts) == (2 if experts else 1))
    entry = next(each for each in folder.entries() if each.key == key)
    folder.read = lambda entry: [torch.ones(part.shape) for part in entry.parts]
    places = [(0, 0, 4), (1, 0, experts)] if experts else [(0, 0, 2)]
    data = torch.zeros(entry.shape)
    shard = ShardedTensor.from_rank_offsets(key, data, *places, prepend_axis_num=len(places))
    counts = (r"\[4, 4\]", r"\[4, 8\]") if experts else (r"\[4\]", r"\[2\]")
    refusal = pytest.raises(
        DataError, match=rf"has {counts[0]} layers .* the run's model {counts[1]}"
    )
    with contextlib.nullcontext() if experts == 4 else refusal:
        fill_alone(monkeypatch, [{"one": shard}], folder)
        assert data.all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_rows_of_the_vocabulary_and_zeros_behind_them(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(96.0 * 32).reshape(96, 32) + 1
    folder = folder_of_numbers()
    folder.read = lambda entry: [whole]
    data = torch.full((51, 32), float("nan"))
    shard = ShardedTensor.from_rank_offsets(WORDS, data, (0, rank, 2))
    fill_alone(monkeypatch, [{"one": shard}], folder)
    padded = torch.cat([whole, torch.zeros(6, 32)])
    assert torch.equal(data, padded[51 * rank : 51 * (rank + 1)])


@pytest.mark.parametrize(
    ("iteration", "skips", "written"), [(5, False, False), (9, False, True), (0, True, True)]
)
def test_only_a_complete_training_is_exported(
    iteration: int, skips: bool, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    said: list[str] = []

    def to_hf(*words: Path, like: Path, **_: Any) -> Any:
        calls.append((*words, like))
        return SimpleNamespace(notes=())

    monkeypatch.setattr(hf, "to_hf", to_hf)
    args = SimpleNamespace(
        skip_train=skips,
        train_iters=9,
        save="save",
        save_hf="new",
        load_hf="there",
        family_file=None,
    )
    run: Any = SimpleNamespace(args=args, iteration=iteration, say=said.append)
    hf.export(run)
    assert calls == [(Path("save"), Path("new"), Path("there"))] * written
    assert ("not written" in said[0]) is not written
