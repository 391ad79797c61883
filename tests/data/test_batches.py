"""Plans of global batches, the loader's rows, and the documents behind them."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.utils import Split

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.data.documents import DocumentDataset, DocumentsConfig
from megatron.dpp_train.data.loader import KINDS, BatchSettings, RowLoader, share, spread
from megatron.dpp_train.data.token_files import Documents, TokenFileWriter, token_type

LENGTHS = [max(2, min(60, round(12 * random.Random(n).lognormvariate(0, 1)))) for n in range(60)]


def write_chats(prefix: Path, lengths: Sequence[int] = LENGTHS) -> str:
    """Chats of these lengths in tokens, whose second half is an answer; the data path."""
    dtype = token_type(100)
    for key in ("chat", "answers"):
        file = TokenFileWriter(Path(f"{prefix}_{key}_document.bin"), dtype)
        for number, length in enumerate(lengths):
            places = np.arange(length)
            ids = (places * (number + 3) + number) % 100 if key == "chat" else places * 2 >= length
            file.add(Documents.of(ids.tolist(), [length], [1], dtype))
        file.finish(Path(f"{prefix}_{key}_document.idx"))
    return f"{prefix}_chat_document"


def dataset(prefix: str, samples: int | None = None, **changes: Any) -> DocumentDataset:
    tokenizer = argparse.Namespace(
        eod=changes.pop("eod", None), unique_identifiers={}, vocab_size=100
    )
    split = changes.pop("split", Split.train)
    given_ = {"sequence_length": 32, "overlong": "cut", "eod_mask_loss": False, "random_seed": 1}
    config = DocumentsConfig(
        blend=([prefix], None), split="1,0,0", tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, **{**given_, **changes},
    )  # fmt: skip
    low = DocumentDataset.build_low_level_dataset(prefix, config)
    return DocumentDataset(low, prefix, np.arange(len(low)), samples, split, config)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_chats(tmp_path_factory.mktemp("chats") / "x")


@given(
    lengths=st.lists(st.integers(1, 64), min_size=24, max_size=24),
    kind=st.sampled_from(KINDS),
    replicas=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 2, 4]),
    multiple=st.sampled_from([1, 4]),
)
def test_replicas_share_a_batch_in_rows_that_fit(
    lengths: list[int], kind: str, replicas: int, size: int, multiple: int
) -> None:
    """Each document once, equal numbers of microbatches, no row above what a stage makes room
    for, and no replica with more than the others but for one microbatch."""
    found, costs = [], []
    for replica in range(replicas):
        settings = BatchSettings(
            kind=kind, num_replicas=replicas, replica=replica, micro_batch_size=size, longest=64,
            document_multiple=multiple, row_multiple=multiple,
        )  # fmt: skip
        rows = share(lengths, settings)
        found += rows
        costs.append([settings.cost([lengths[i] for i in row]) for row in rows])
        assert len(rows) == 24 // (size * replicas)
        for row in rows:
            own = [lengths[i] for i in row]
            bounds = settings.bounds(own)
            assert settings.tokens(own) <= size * 64 and bounds[-1] % multiple == 0
            if kind == "packed":
                widths = [end - begin for begin, end in itertools.pairwise(bounds)]
                assert all(w >= n and w % multiple == 0 for w, n in zip(widths, own, strict=True))
            else:
                assert len(row) == size and bounds[-1] >= max(own)
    assert sorted(i for row in found for i in row) == list(range(24))
    most = max(map(max, costs))
    assert max(map(sum, costs)) <= min(map(sum, costs)) + 2 * most


def test_items_that_do_not_fit_are_told() -> None:
    assert spread([3, 3, 2], 2, sizes=[3, 3, 2], capacity=4) is None
    assert spread([3, 3, 2], 2, sizes=[3, 3, 2], capacity=5) == [[0, 2], [1]]
    with pytest.raises(ConfigError, match="--global-batch-size 6 with --micro-batch-size 2 on 2"):
        share([1] * 6, BatchSettings(kind="padded", longest=9, num_replicas=2, micro_batch_size=2))


def test_packed_rows_are_alike_in_time_and_end_at_a_multiple() -> None:
    settings = BatchSettings(
        kind="packed", micro_batch_size=2, longest=64, document_multiple=2, row_multiple=8,
        hidden_size=100,
    )  # fmt: skip
    assert share([60, 60, 4, 4], settings) == [[0, 2], [1, 3]]
    assert settings.bounds([3, 5]) == (0, 4, 16)
    assert settings.cost([1200]) == 2 * 1200  # attention takes as long as the rest


def test_every_epoch_split_and_seed_draws_an_order_of_its_own(chats: str) -> None:
    size = len(dataset(chats))

    def order(epoch: int, **changes: Any) -> tuple[tuple[int, ...], ...]:
        data = dataset(chats, samples=3 * size, **changes)
        return tuple(tuple(data[i]["tokens"]) for i in range(epoch * size, (epoch + 1) * size))

    orders = [order(0), order(1), order(2), order(0, split=Split.valid), order(0, random_seed=2)]
    assert len(set(orders)) == len(orders) and order(1) == orders[1]
    assert len({tuple(sorted(each)) for each in orders}) == 1 and len(set(orders[0])) == size


def test_documents_are_cut_left_out_or_refused(tmp_path: Path) -> None:
    """Those without a label too, and chats without an answer in what they are cut to."""
    path = write_chats(tmp_path / "x", [1, 33, 34, 9, 64, 65, 70])
    for overlong, lengths in (("skip", [8, 32]), ("cut", [8, 32, 32, 32])):
        data = dataset(path, overlong=overlong)
        assert sorted(data.length(i) for i in range(len(data))) == lengths
        assert sorted(len(data[i]["mask"]) for i in range(len(data))) == lengths
        assert all(data[i]["mask"].any() for i in range(len(data)))
    with pytest.raises(DataError, match="4 of 7 documents exceed --seq-length 32, the longest"):
        dataset(path, overlong="error")
    assert len(dataset(path, overlong="error", sequence_length=100)) == 6
    with pytest.raises(DataError, match="no document has 2 to 3 tokens with a part of an answer"):
        dataset(path, sequence_length=2)


def test_marks_of_other_documents_are_refused(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x", [5, 6])
    write_chats(tmp_path / "y", [6, 5])
    for end in ("bin", "idx"):
        (tmp_path / f"y_answers_document.{end}").replace(tmp_path / f"x_answers_document.{end}")
    with pytest.raises(DataError, match="x_answers_document: marks other documents than"):
        dataset(path)


def test_answers_alone_have_a_loss_and_texts_up_to_their_end(chats: str, tmp_path: Path) -> None:
    data = dataset(chats, sequence_length=60)
    for number in range(5):
        length = len(data[number]["tokens"])
        wanted = [float(2 * i >= length) for i in range(1, length)]
        assert data[number]["mask"].tolist() == wanted
    for end in ("bin", "idx"):
        (tmp_path / f"t.{end}").write_bytes(Path(f"{chats}.{end}").read_bytes())
    text = dataset(str(tmp_path / "t"), eod=7, eod_mask_loss=True)
    for number in range(20):
        tokens = text[number]["tokens"][:-1]
        assert text[number]["mask"].tolist() == [float(token != 7) for token in tokens]


def loader(chats: str, kind: str, consumed: int = 0, **changes: Any) -> RowLoader:
    settings = {"micro_batch_size": 2, "longest": 32, "hidden_size": 8, **changes}
    announce = settings.pop("announce", None)
    data = dataset(chats, samples=40)
    return RowLoader(
        data, BatchSettings(kind=kind, **settings), lambda: 8, consumed, reads=True,
        announce=announce,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rows_hold_the_documents_and_padding_has_no_loss(chats: str, kind: str) -> None:
    data = dataset(chats, samples=40)
    wanted = sorted(tuple(data[i]["tokens"]) for i in range(16))
    found = []
    for row in itertools.islice(loader(chats, kind, row_multiple=4, document_multiple=2), 8):
        tensors = row.tensors or {}
        assert tensors["tokens"].shape == (row.num_rows, row.bounds[-1])
        padding = row.padding()
        assert not tensors["loss_mask"][padding].any()
        assert tensors["position_ids"].max() == max(row.lengths) - 1
        assert (~padding).sum() == sum(row.lengths)
        for number, length in enumerate(row.lengths):
            at, begin = (0, row.bounds[number]) if kind == "packed" else (number, 0)
            part = {name: each[at, begin : begin + length] for name, each in tensors.items()}
            assert part["position_ids"].tolist() == list(range(length))
            found.append((*part["tokens"].tolist(), int(part["labels"][-1])))
    assert sorted(found) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_where_it_stopped_and_knows_each_step_before(chats: str, kind: str) -> None:
    told: list[Sequence[int]] = []
    rows = list(itertools.islice(loader(chats, kind, announce=told.append), 20))
    sizes = [row.bounds[-1] * row.num_rows for row in rows]
    assert [list(each) for each in told] == [sizes[i : i + 4] for i in range(0, 20, 4)]
    again = itertools.islice(loader(chats, kind, 16), 12)
    for row, other in zip(rows[8:], again, strict=True):
        assert row.lengths == other.lengths and row.tensors and other.tensors
        assert all(torch.equal(row.tensors[name], other.tensors[name]) for name in row.tensors)
    with pytest.raises(DataError, match="0 of 8 documents are left for a step"):
        next(loader(chats, kind, 40))


@pytest.mark.parametrize("kind", KINDS)
def test_context_parallel_ranks_share_each_document(chats: str, kind: str) -> None:
    row = next(loader(chats, kind, document_multiple=4, row_multiple=4))
    parts = [row.part(2, rank) for rank in range(2)]
    places = torch.arange(row.bounds[-1])
    assert sorted(torch.cat([places[part] for part in parts]).tolist()) == places.tolist()
    begin, end = row.bounds[:2]
    quarter = (end - begin) // 4
    first = places[parts[0]][: 2 * quarter].tolist()
    assert first == [*range(quarter), *range(3 * quarter, 4 * quarter)]
