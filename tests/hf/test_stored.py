"""Checkpoints that are read for an export: what they hold is used, compared, or refused."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.dpp.errors import DataError
from megatron.dpp_train import hf
from megatron.dpp_train.hf import checkpoint
from megatron.dpp_train.hf.families import find_families
from megatron.dpp_train.hf.fields import parse_config, read_config
from megatron.dpp_train.hf.folder import Folder
from megatron.dpp_train.hf.rules import join
from megatron.dpp_train.hf.saved import attributes, check_same, completed, write_config
from megatron.dpp_train.hf.tables import Entry, Part
from tests.hf.test_fields import YARN


class Harmful:
    """Would make the directory ``path`` when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


Change = Callable[[list[Entry]], list[Entry]]


def stored(
    source: Path, target: Path, change: Change = lambda found: found, **trained: Any
) -> Path:
    """A checkpoint of the model in ``source`` with other entries, by a run with other arguments."""
    folder = Folder(source)
    args = argparse.Namespace(**attributes(folder.config) | trained)

    def read(entry: Entry) -> torch.Tensor:
        return join(entry.rule, folder.read(entry), folder.config.sizes)

    target.mkdir()
    entries = change(folder.entries)
    checkpoint.write(target, entries, folder.config.sizes, torch.float32, read, args)
    return target


def export(source: Path, target: Path, like: Path) -> dict[str, torch.Tensor]:
    hf.to_hf(source, target, like=like)
    return load_file(target / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: Path) -> bool:
    there = load_file(other / "model.safetensors")
    return one.keys() == there.keys() and all(torch.equal(one[key], there[key]) for key in one)


def entry_of(key: str, *shape: int, **changes: Any) -> Entry:
    """An entry of one part, without layers."""
    usual = {"rule": "same", "twin": False, "by_vocab": False, "parts": (Part("w", shape),)}
    return Entry(key, (), (), shape, **usual | changes)


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of these tensors."""
    folder.mkdir()
    sizes: Any = SimpleNamespace(layers=0, experts=0)
    found = [entry_of(key, *tensor.shape) for key, tensor in tensors.items()]
    checkpoint.write(
        folder, found, sizes, torch.float32, lambda each: tensors[each.key], argparse.Namespace()
    )
    return folder


@contextlib.contextmanager
def metadata_of(folder: Path) -> Iterator[Any]:
    """The list of a checkpoint's tensors, which a test may change."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def test_reading_a_checkpoint_runs_nothing_that_it_names(tmp_path: Path) -> None:
    harmful = Harmful(tmp_path / "made")
    folder = written(tmp_path / "ckpt", {"k": torch.ones(2)})
    torch.save(harmful, folder / "shard")
    with metadata_of(folder) as metadata:
        for index, info in metadata.storage_data.items():
            if index.fqn == "k":
                info.relative_path, info.offset = "shard", 0
                info.length = (folder / "shard").stat().st_size
    with pytest.raises(DataError, match="shard: unreadable"):
        checkpoint.Stored(folder).read(entry_of("k", 2))
    torch.save({"args": harmful}, folder / "common.pt")
    checkpoint.Stored(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(harmful))
    with pytest.raises((DataError, AttributeError)):
        checkpoint.Stored(folder)
    assert not (tmp_path / "made").exists()


def test_parts_are_files_of_the_checkpoint_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "ckpt", {"k": torch.ones(2)})
    (folder / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    with metadata_of(folder) as metadata:
        for info in metadata.storage_data.values():
            info.relative_path = "../__0_0.distcp"
    with pytest.raises(DataError, match=r"ckpt/__0_0\.distcp: No such file"):
        checkpoint.Stored(folder).read(entry_of("k", 2))


def test_groups_of_queries_count_where_they_are_used(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Megatron's default of their number is 1, whatever it is without them."""
    source = stored(made("gpt2"), tmp_path / "ckpt", num_query_groups=1)
    assert same(export(source, tmp_path / "out", made("gpt2")), made("gpt2"))


@pytest.mark.parametrize(
    ("rows", "width", "fits"), [(96, 8, True), (128, 8, True), (95, 8, False), (96, 9, False)]
)
def test_a_vocabulary_may_be_padded_and_not_cut(
    rows: int, width: int, fits: bool, tmp_path: Path
) -> None:
    found = checkpoint.Stored(written(tmp_path / "x", {"k": torch.zeros(rows, width)}))
    said = rf"x: k is \[{rows}, {width}\], the model's is \[96, 8"
    with contextlib.nullcontext() if fits else pytest.raises(DataError, match=said):
        found.check(entry_of("k", 96, 8, by_vocab=True))


def test_a_padded_vocabulary_is_read_from_the_parts_of_several_ranks(tmp_path: Path) -> None:
    whole = torch.arange(102.0 * 8).reshape(102, 8)
    firsts = (0, 34, 68)
    folder = written(tmp_path / "x", {f"{at}": whole[at : at + 34] for at in firsts})
    entry = entry_of("k", 96, 8, by_vocab=True)
    for kept in (firsts, firsts[1:]):
        with metadata_of(folder) as metadata:
            places = {index.fqn: info for index, info in metadata.storage_data.items()}
            of_part = metadata.state_dict_metadata["0"]
            offsets = {at: torch.Size((at, 0)) for at in kept}
            metadata.state_dict_metadata["k"] = dataclasses.replace(
                of_part, size=torch.Size((102, 8)),
                chunks=[dataclasses.replace(of_part.chunks[0], offsets=each)
                        for each in offsets.values()],
            )  # fmt: skip
            for at in firsts:
                metadata.storage_data.pop(MetadataIndex("k", torch.Size((at, 0))), None)
            for at, offset in offsets.items():
                metadata.storage_data[MetadataIndex("k", offset)] = places[f"{at}"]
        found = checkpoint.Stored(folder)
        if kept == firsts:
            assert torch.equal(found.read(entry), whole[:96])
            continue
        with pytest.raises(DataError, match="x: k is not whole"):
            found.read(entry)


def test_parameters_that_the_family_lacks_are_refused(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those of the optimizer are left out."""
    source = made("llama")
    for number, (key, fits) in enumerate(
        [
            ("optimizer.state.exp_avg.x", True),
            ("chained_0.optimizer.state.x", True),
            ("decoder.layers.mlp.linear_fc1._extra_state", True),
            ("decoder.layers.mlp.shared_experts.x", False),
            ("mtp.layers.0.x", False),
        ]
    ):
        ours = stored(
            source, tmp_path / f"{number}", lambda f, key=key: [*f, replace(f[0], key=key)]
        )
        said = f"holds {key}, which llama does not have"
        with contextlib.nullcontext() if fits else pytest.raises(DataError, match=said):
            assert same(export(ours, tmp_path / f"x{number}", source), source)


@pytest.mark.parametrize("left", ["mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"])
def test_either_name_of_the_norm_of_experts_is_read(
    left: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Local layers have one, Transformer Engine's the other."""
    source = made("mixtral")
    ours = stored(source, tmp_path / "ours", lambda found: [e for e in found if left not in e.key])
    assert same(export(ours, tmp_path / "x", source), source)


def test_layers_stored_apart_are_read(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = made("mixtral")

    def apart(entry: Entry) -> Entry:
        if not entry.place:
            return entry
        key = entry.key.replace("layers.", f"layers.{entry.place[0]}.")
        return replace(entry, key=key, place=entry.place[1:], counts=entry.counts[1:])

    ours = stored(source, tmp_path / "ours", lambda found: [apart(each) for each in found])
    assert same(export(ours, tmp_path / "x", source), source)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "rotary_base", 5000000),
        ("llama", "layernorm_epsilon", 1e-5),
        ("llama", "rope_scaling_factor", 4.0),
        ("llama", "use_rope_scaling", False),
        ("llama", "num_attention_heads", 8),
        ("llama", "num_query_groups", 4),
        ("llama", "squared_relu", True),
        ("llama", "rotary_interleaved", True),
        ("llama", "hf_forms", "output-norms"),
        ("gpt2", "quick_geglu", True),
        ("gpt2", "layernorm_zero_centered_gamma", True),
        ("qwen3_moe", "moe_shared_expert_intermediate_size", 8),
        ("qwen3_moe", "moe_router_score_function", "sigmoid"),
        ("qwen3_moe", "moe_layer_freq", [0, 1, 1, 1]),
        ("mixtral", "moe_router_pre_softmax", True),
        ("granite", "hf_forms", "embedding-scale=2.0"),
    ],
)
def test_a_config_that_the_run_did_not_train_is_refused(
    family: str, name: str, value: Any, made: Callable[[str], Path], tmp_path: Path
) -> None:
    source = made(family)
    alike = {"moe_layer_freq": [1] * 4, "add_qkv_bias": family == "gpt2", "window_size": None}
    assert same(export(stored(source, tmp_path / "a", **alike), tmp_path / "b", source), source)
    ours = stored(source, tmp_path / "ours", **{name: value})
    with pytest.raises(DataError, match=f"{name} is .*, there "):
        export(ours, tmp_path / "x", source)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        YARN | {"mscale": 1.2, "mscale_all_dim": 0.7},
        YARN | {"attention_factor": 1.3, "truncate": False, "beta_fast": 8, "beta_slow": 2},
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_rotary_embeddings_come_back_as_they_were(
    rope: dict[str, Any], made: Callable[[str], Path]
) -> None:
    """The frequencies of transformers are those of the ``config.json`` that is written."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    content = read_config(made("llama")).content | {"rope_parameters": rope | {"rope_theta": 1e4}}
    config = parse_config(content, "x")
    args = argparse.Namespace(**attributes(config))
    again = write_config(find_families()["llama"], completed(args))
    check_same(args, parse_config(again, "x"), "", "")
    found = [
        ROPE_INIT_FUNCTIONS[rope["rope_type"]](LlamaConfig(**each)) for each in (content, again)
    ]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor, part: delattr(part, "relative_path"),
        lambda tensor, part: setattr(part, "relative_path", 5),
        lambda tensor, part: setattr(tensor.properties, "dtype", 5),
        lambda tensor, part: delattr(tensor, "size"),
    ],
)
def test_a_damaged_part_is_refused(spoil: Callable[[Any, Any], None], tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"k": torch.ones(2)})
    with metadata_of(folder) as metadata:
        parts = {index.fqn: info for index, info in metadata.storage_data.items()}
        spoil(metadata.state_dict_metadata["k"], parts["k"])
    with pytest.raises(DataError, match=r"\.metadata: damaged"):
        checkpoint.Stored(folder)


def test_arguments_that_are_none_are_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path / "x", {"k": torch.ones(2)})
    assert vars(checkpoint.Stored(folder).args) == {}
    torch.save({"args": 5}, folder / "common.pt")
    assert checkpoint.Stored(folder).args is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(pickle.dumps(7), r"damaged \('int' object", id="a number"),
        pytest.param(b"\x80\x02Nr\0\0\0\x20.", "unreadable .MemoryError", id="a memo of 8 GiB"),
    ],
)
def test_a_list_of_tensors_that_is_none_is_refused(
    content: bytes, said: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "x", {"k": torch.ones(2)})
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(DataError, match=rf"\.metadata: {said}"):
        checkpoint.Stored(folder)
