"""Sequences of unlike length: samples, batches, and runs that resume to the last bit."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron.dpp.errors import DataError
from megatron.dpp.sim.batches import BatchPlans, BatchSettings, share_batch
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp_train.data import sequences
from megatron.dpp_train.data.sequences import Microbatch, SequenceDataset, collate
from megatron.dpp_train.options.run_config import Settings
from tests.loop.several import train_each
from tests.parity.runs import Result

LENGTHS = [max(2, min(60, round(12 * random.Random(n).lognormvariate(0, 1)))) for n in range(60)]


def write_chats(prefix: Path, lengths: Sequence[int] = LENGTHS) -> Path:
    """Chats of these lengths in tokens, whose second half is an answer; the data path."""
    for key in ("chat", "answers"):
        builder = IndexedDatasetBuilder(f"{prefix}_{key}_document.bin", dtype=numpy.uint16)
        for number, length in enumerate(lengths):
            places = torch.arange(length)
            ids = (places * (number + 3) + number) % 100 if key == "chat" else places * 2 >= length
            builder.add_document(ids.int(), [length])
        builder.finalize(f"{prefix}_{key}_document.idx")
    return Path(f"{prefix}_chat_document")


def dataset(prefix: Path, samples: int | None = None, **changes: Any) -> SequenceDataset:
    config = argparse.Namespace(
        **{
            "sequence_length": 32,
            "chats": True,
            "overlong": "cut",
            "end_of_document": None,
            "random_seed": 1,
            "mmap_bin_files": True,
            **changes,
        }
    )
    low = SequenceDataset.build_low_level_dataset(str(prefix), config)
    made = SequenceDataset.__new__(SequenceDataset)
    made.dataset, made.indices, made.num_samples = low, numpy.arange(len(low)), samples
    made.config, made.index_split = config, Split.train
    made._choose()
    return made


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "x")


def test_every_epoch_has_each_document_once_in_another_order(chats: Path) -> None:
    data = dataset(chats, samples=3 * len(LENGTHS))
    size = len(LENGTHS)
    epochs = [[tuple(data[i]["tokens"]) for i in range(e * size, (e + 1) * size)] for e in range(3)]
    assert all(len(set(epoch)) == size for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1] != epochs[2]
    assert [data.length(i) for i in range(size)] == [len(t) - 1 for t in epochs[0]]


def test_each_epoch_split_and_seed_draws_an_order_of_its_own(chats: Path) -> None:
    """A validation set of the same documents is not read in the order of training."""

    def order(epoch: int = 0, **changes: Any) -> tuple[tuple[int, ...], ...]:
        data = dataset(chats, **{k: v for k, v in changes.items() if k != "split"})
        data.index_split = changes.get("split", Split.train)
        size = len(LENGTHS)
        return tuple(tuple(data[i]["tokens"]) for i in range(epoch * size, (epoch + 1) * size))

    orders = [order(), order(1), order(2), order(split=Split.valid), order(random_seed=2)]
    assert len(set(orders)) == len(orders)
    assert all(sorted(each) == sorted(orders[0]) for each in orders)
    assert len(set(orders[0])) == len(LENGTHS)
    assert order(1) == orders[1]


def test_documents_without_a_label_are_left_out(tmp_path: Path) -> None:
    data = dataset(write_chats(tmp_path / "x", [1, 5, 2, 1]))
    assert sorted(data.length(i) for i in range(len(data))) == [1, 4]


def test_the_longest_documents_fit_and_longer_ones_are_cut_or_left_out(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "x", [33, 34, 9])
    for overlong, lengths in (("skip", [8, 32]), ("cut", [8, 32, 32])):
        data = dataset(chats, overlong=overlong)
        assert sorted(data.length(i) for i in range(len(data))) == lengths
        assert sorted(len(data[i]["mask"]) for i in range(len(data))) == lengths
    with pytest.raises(ValueError, match="a document has 34 tokens, above 33"):
        dataset(chats, overlong="error")


def test_chats_without_an_answer_in_what_is_left_are_left_out(tmp_path: Path) -> None:
    """Answers are the second half of these chats."""
    data = dataset(write_chats(tmp_path / "x", [64, 65, 70, 66, 9]))
    assert sorted(data.length(i) for i in range(len(data))) == [8, 32]
    assert all(data[i]["mask"].any() for i in range(len(data)))


def test_marks_of_other_documents_are_refused(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "x", [5, 6])
    write_chats(tmp_path / "y", [6, 5])
    for end in ("bin", "idx"):
        (tmp_path / f"y_answers_document.{end}").replace(tmp_path / f"x_answers_document.{end}")
    with pytest.raises(ValueError, match="x_answers_document marks other documents than"):
        dataset(chats)


@pytest.mark.parametrize(
    ("trace", "place", "writes"),
    [(True, (0, 0, 0), True), (False, (0, 0, 0), False), (True, (1, 0, 0), False),
     (True, (0, 1, 0), False), (True, (0, 0, 1), False)],
)  # fmt: skip
def test_the_lengths_of_a_step_are_written_once_per_replica(
    trace: bool, place: tuple[int, int, int], writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("pipeline_model", "tensor_model", "context")
    for name, rank in zip(names, place, strict=True):
        monkeypatch.setattr(sequences.mpu, f"get_{name}_parallel_rank", lambda rank=rank: rank)
    monkeypatch.setattr(sequences.mpu, "get_data_parallel_rank", lambda: 3)
    layout = argparse.Namespace(path=lambda folder: Path(folder) / "trace" / "file")
    monkeypatch.setattr(sequences, "trace_layout", lambda args: layout)
    told: list[Any] = []
    monkeypatch.setattr(sequences, "write_step", lambda *given: told.append(given))
    plans: Any = BatchPlans(lambda a, b: LENGTHS[a:b], 4, 1, BatchSettings(num_replicas=2))
    args: Any = argparse.Namespace(trace=trace, trace_dir="x")
    sequences.write_lengths(args, plans, 8, 5)
    assert len(told) == writes
    for path, iteration, step in told:
        assert path == Path("x/trace") / sequences.FILE.format(3) and iteration == 5
        assert step.microbatches == plans.own_lengths(8) and step.padded == sum(plans.own_sizes(8))


def test_a_long_document_is_cut_or_skipped_or_refused(chats: Path) -> None:
    cut, skipped = dataset(chats), dataset(chats, overlong="skip")
    assert max(cut.length(i) for i in range(len(cut))) == 32 and len(cut) == len(LENGTHS)
    assert len(skipped) == sum(length <= 33 for length in LENGTHS)
    with pytest.raises(ValueError, match="above 33"):
        dataset(chats, overlong="error")


def test_answers_alone_have_a_loss(chats: Path) -> None:
    data = dataset(chats, sequence_length=60)
    for number in range(5):
        sample = data[number]
        length = len(sample["tokens"])
        assert sample["mask"].tolist() == [float(2 * i >= length) for i in range(1, length)]


def test_what_follows_the_end_of_a_document_has_no_loss(chats: Path) -> None:
    plain = dataset(chats, chats=False)
    assert all(plain[number]["mask"].all() for number in range(len(plain)))
    end = int(max((plain[number]["tokens"] for number in range(len(plain))), key=len)[3])
    data = dataset(chats, chats=False, end_of_document=end)
    masks = [data[number]["mask"].tolist() for number in range(len(data))]
    assert masks == [
        [float(token != end) for token in data[number]["tokens"][:-1]]
        for number in range(len(data))
    ]
    assert any(0.0 in mask for mask in masks)


def _sample(*ids: int) -> dict[str, numpy.ndarray]:
    mask = numpy.asarray([0.0] + [1.0] * (len(ids) - 2), dtype=numpy.float32)
    return {"tokens": numpy.asarray(ids), "mask": mask}


def test_sequences_of_one_microbatch_are_padded_to_the_longest() -> None:
    batch = collate([_sample(1, 2, 3), _sample(4, 5, 6, 7, 8)], BatchSettings(length_multiple=3))
    assert batch["tokens"].tolist() == [[1, 2, 0, 0, 0, 0], [4, 5, 6, 7, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 0, 0, 0, 0], [5, 6, 7, 8, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    assert batch["loss_weights"].sum(dim=1).tolist() == [1.0, pytest.approx(1.0)]


@pytest.mark.filterwarnings("error")
def test_a_sequence_without_an_answer_weighs_nothing() -> None:
    """As a chat whose answer was cut off."""
    silent = {"tokens": numpy.asarray([1, 2, 3]), "mask": numpy.zeros(2, dtype=numpy.float32)}
    batch = collate([silent, _sample(4, 5, 6)], BatchSettings())
    assert batch["loss_weights"].tolist() == [[0, 0], [0, 1]]


def test_packed_sequences_share_a_row_and_restart_positions() -> None:
    batch = collate(
        [_sample(1, 2, 3), _sample(4, 5, 6, 7, 8)], BatchSettings(packing="even", length_multiple=4)
    )
    assert batch["tokens"].tolist() == [[1, 2, 4, 5, 6, 7, 0, 0]]
    assert batch["position_ids"].tolist() == [
        [0, 1, 0, 1, 2, 3, 3, 3]
    ]  # none that a table may lack
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 1, 1, 1, 0, 0]]


def test_padding_belongs_to_the_last_packed_sequence() -> None:
    settings = BatchSettings(packing="even", length_multiple=4)
    one = Microbatch((2, 4), settings.shape((2, 4)), 1.0, None).packed(torch.device("cpu"))
    assert one["cu_seqlens"].tolist() == [0, 2, 8] and one["max_seqlen"] == 6


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("packing", ["none", "in-order", "ffd", "even"])
@pytest.mark.parametrize("order", ["drawn", "ascending", "small-big-small"])
def test_replicas_share_each_global_batch_wherever_a_run_begins(
    replicas: int, packing: str, order: str
) -> None:
    settings = BatchSettings(
        num_replicas=replicas, packing=packing, budget=70, order=order, multiple=2, num_ranks=2
    )
    plans = [BatchPlans(lambda a, b: LENGTHS[a:b], 16, r, settings) for r in range(replicas)]
    for first in (0, 16, 32):
        found = [plan.microbatches(first) for plan in plans]
        flat = [sample for each in found for microbatch in each for sample in microbatch]
        assert sorted(flat) == list(range(first, first + 16))
        assert len({len(each) for each in found}) == 1
        assert packing == "none" or len(found[0]) % 2 == 0
        sums = [sum(LENGTHS[i] for i in each) for r in found for each in r]
        assert packing == "none" or max(sums) <= 70
        again = BatchPlans(lambda a, b: LENGTHS[a:b], 16, 0, settings)
        assert again.microbatches(first) == found[0]


def test_the_end_of_the_data_is_named() -> None:
    plans = BatchPlans(lambda a, b: LENGTHS[:60][a:b], 16, 0, BatchSettings(micro_batch_size=2))
    assert plans.num_microbatches(32) == 8
    with pytest.raises(DataError, match="the data set has ended: 12 of 16 sequences are left"):
        plans.num_microbatches(48)


def test_even_packing_makes_fewer_microbatches_than_sequences() -> None:
    """A batch that no multiple divides was refused, although it can be packed."""
    settings = BatchSettings(packing="even", num_ranks=4, multiple=4, budget=70)
    assert len(BatchPlans(lambda a, b: [5] * (b - a), 10, 0, settings).microbatches(0)) == 8


def test_the_largest_microbatch_is_cut_where_replicas_need_more() -> None:
    settings = BatchSettings(num_replicas=3, packing="in-order", budget=10)
    found = share_batch([6, 4, 1, 1], settings)
    assert sorted(each for replica in found for each in replica) == [[0], [1], [2, 3]]


def test_lengths_of_a_blend_are_those_of_the_samples_that_it_draws() -> None:
    made: Any = BlendedDataset.__new__(BlendedDataset)
    made.config = argparse.Namespace(defer_npy_index_mmap=False)
    made.size = 3
    made.dataset_index, made.dataset_sample_index = numpy.array([[1, 0, 1], [2, 0, 0]])
    made.datasets = [argparse.Namespace(length=lambda i, n=n: n + i) for n in (10, 20)]
    assert sequences.lengths_of(made, 0, 2) == [22, 10]
    assert sequences.lengths_of(made, 1, 9) == [10, 20]


@pytest.mark.parametrize(
    ("chunks", "dynamic", "multiple"), [(None, False, 1), (2, False, 4), (2, True, 1)]
)
def test_only_megatrons_interleaved_schedule_needs_multiples(
    chunks: int | None, dynamic: bool, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "length_costs", lambda _: LengthCosts())
    args: Any = argparse.Namespace(
        virtual_pipeline_model_parallel_size=chunks, use_dpp=dynamic, data_parallel_size=2,
        pipeline_model_parallel_size=4, micro_batch_size=1, packing="even", packing_budget=70,
        length_multiple=4, length_buckets=(8,), order="ascending", seq_length=64, slice_tokens=None,
        holds_whole=True,
    )  # fmt: skip
    made = sequences.batch_settings(args)
    assert (made.multiple, made.packing, made.buckets, made.order) == (
        *(multiple, "even", (8,), "ascending"),
    )
    plain = sequences.batch_settings(args, plain=True)
    assert (plain.packing, plain.buckets, plain.order) == ("none", (), "drawn")
    assert sequences.longest_microbatch(args) == 72
    args.packing_budget = 0
    assert sequences.longest_microbatch(args) == 64


@pytest.mark.parametrize(
    ("dynamic", "cap", "told"),
    [(True, "1.0", "1.0"), (True, "8GB", "auto"), (True, "8gb", "auto"), (True, "3p", "3p"),
     (False, "3p", "auto")],
)  # fmt: skip
def test_the_planner_simulates_the_pipeline_of_the_run(
    dynamic: bool, cap: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows of the longest, and with a cap that counts activations, not bytes."""
    monkeypatch.setattr(sequences, "length_costs", lambda _: LengthCosts())
    monkeypatch.setattr(sequences, "head_share", lambda _: 0.25)
    args: Any = Settings(
        dpp_activation_cap=cap, use_dpp=dynamic, pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=None, packing_budget=0, seq_length=64,
        micro_batch_size=3, dpp_policy="a policy", dpp_split_backward="auto",
    )  # fmt: skip
    made = sequences.pipeline_model(args)
    assert (made.num_ranks, made.num_chunks, made.longest, made.cap) == (4, 1, 192, told)
    assert made.policy == ("a policy" if dynamic else None) and made.split_backward
    assert made.head == 0.25
    args.recompute_granularity = "full"
    assert not sequences.pipeline_model(args).split_backward
    args.recompute_granularity = None
    args.virtual_pipeline_model_parallel_size, args.dpp_split_backward = 2, "off"
    made = sequences.pipeline_model(args)
    assert made.num_chunks == 2 and not made.split_backward


@pytest.mark.parametrize("size", [1, 2])
def test_replicas_of_a_loader_share_each_batch_and_weigh_each_sequence_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last, incomplete batch is left out; a run goes on behind what it has consumed."""
    monkeypatch.setattr(sequences, "length_costs", lambda _: LengthCosts())
    lengths = [5, 3, 9, 4, 7, 2, 8, 6, 5, 4, 1]

    class Lengths:
        def __len__(self) -> int:
            return len(lengths)

        def length(self, number: int) -> int:
            return lengths[number]

    data = Lengths()
    args: Any = argparse.Namespace(
        virtual_pipeline_model_parallel_size=None, use_dpp=True, data_parallel_size=2,
        pipeline_model_parallel_size=1, micro_batch_size=size, packing="none", packing_budget=0,
        length_multiple=1, length_buckets=(), order="drawn", seq_length=9, global_batch_size=4,
        slice_tokens=None, holds_whole=True,
    )  # fmt: skip
    read: list[int] = []
    for replica in range(2):
        monkeypatch.setattr(sequences.mpu, "get_data_parallel_rank", lambda r=replica: r)
        loader = sequences.SequenceLoader(args, data, 3, reads=False)
        assert len(loader) == 2
        read += [sample for batch in loader.batches() for sample in batch]
        made = list(loader)
        assert {each.share for each in made} == {1 / size}
        assert [len(each.lengths) for each in made] == [size] * (4 // size)
        assert [lengths[i] for batch in loader.batches() for i in batch] == [
            length for each in made for length in each.lengths
        ]
    assert sorted(read) == list(range(3, 11))
    with pytest.raises(DataError, match="11 of 11 sequences are consumed"):
        sequences.SequenceLoader(args, data, 11, reads=False)


FLAGS = (
    "--sft --seq-length 64 --max-position-embeddings 64 --num-layers 4 --lr-decay-iters 4 "
    "--global-batch-size 8 --overlong cut --hidden-dropout 0 "
    "--attention-dropout 0"
)
pytestmark = pytest.mark.timeout(450)
PP2 = "--pipeline-model-parallel-size 2"
PACKED = "--packing ffd --packing-budget 70 --calculate-per-token-loss"
BUCKETS = "--dpp-length-buckets 16,40"
V2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
SHORT, EPOCH = "--train-iters 2", "--train-iters 3 --num-workers 1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Runs of two batches, and of three, which are more than an epoch; a saved one has seen 16 of
    20 chats."""
    save = "--save DIR/{}.ckpt --save-interval 2"
    load = "--load DIR/{}.ckpt --ckpt-step 2"
    lines = {
        "static": f"{EPOCH} {PP2} {save.format('static')}",
        "dynamic": f"{EPOCH} {PP2} --use-dpp {save.format('dynamic')}",
        "resumed": f"{EPOCH} {PP2} --use-dpp {load.format('dynamic')}",
        "elsewhere": f"--train-iters 3 {V2} --use-dpp {load.format('static')}",
        "planned": f"{SHORT} {V2} --order planned --use-dpp",
        "packed-dynamic": f"{SHORT} {PP2} {PACKED} --use-dpp",
        "packed-static": f"{SHORT} {PP2} {PACKED}",
        "packed-order": (
            f"{SHORT} {V2} --packing even --packing-budget 70 --order planned --use-dpp"
        ),
        "planned-static": f"{SHORT} {V2} --order planned PLAN-AS-DYNAMIC",
        "buckets-static": f"{SHORT} {PP2} {BUCKETS}",
        "buckets-dynamic": f"{SHORT} {PP2} {BUCKETS} --use-dpp",
    }
    return _run(tmp_path_factory.mktemp("sequences"), lines)


def _run(folder: Path, lines: dict[str, str]) -> dict[str, Result]:
    data = f"--data-path {write_chats(folder / 'x', LENGTHS[1::3])} --split 1,0,0"
    return train_each(folder, 2, {k: f"{FLAGS} {v}" for k, v in lines.items()}, data, timeout=400)


def _losses(run: Result) -> list[float]:
    return run.column("lm loss")


def test_a_dynamic_run_equals_a_static_one(runs: dict[str, Result]) -> None:
    assert len(_losses(runs["static"])) == 3
    assert _losses(runs["dynamic"]) == _losses(runs["static"])
    assert runs["dynamic"].hashes == runs["static"].hashes


def test_a_planned_order_equals_the_static_run_in_that_order(runs: dict[str, Result]) -> None:
    assert _losses(runs["planned"]) == _losses(runs["planned-static"])
    assert runs["planned"].hashes == runs["planned-static"].hashes


def test_a_packed_dynamic_run_equals_a_static_one(runs: dict[str, Result]) -> None:
    assert _losses(runs["packed-dynamic"]) == _losses(runs["packed-static"])
    assert runs["packed-dynamic"].hashes == runs["packed-static"].hashes


def test_packing_changes_no_loss(runs: dict[str, Result]) -> None:
    """With the same parameters the loss is the same, up to the order of sums."""
    for packed, plain in (("packed-dynamic", "static"), ("packed-order", "planned")):
        assert _losses(runs[packed])[0] == pytest.approx(_losses(runs[plain])[0], rel=1e-6)
    # Every sequence has the same weight, whatever it is packed with.
    norms = [runs[name].column("grad norm")[0] for name in ("packed-order", "planned")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_buckets_pad_and_change_no_loss(runs: dict[str, Result]) -> None:
    """Causal attention does not see what follows, and padding has no loss."""
    static, plain = runs["buckets-static"], runs["static"]
    assert _losses(runs["buckets-dynamic"]) == _losses(static)
    assert runs["buckets-dynamic"].hashes == static.hashes
    assert _losses(static) == pytest.approx(_losses(plain)[:2], rel=1e-5)
    assert static.column("grad norm") == pytest.approx(plain.column("grad norm")[:2], rel=1e-3)
    assert all(0.1 < share < 0.6 for share in static.column("padding"))


def test_a_run_resumes_in_the_middle_of_an_epoch(runs: dict[str, Result]) -> None:
    assert _losses(runs["resumed"]) == _losses(runs["dynamic"])[2:]
    assert runs["resumed"].hashes == runs["dynamic"].hashes


def test_a_run_resumes_in_another_layout(runs: dict[str, Result]) -> None:
    """The batches are the same, and so is their loss with the same parameters."""
    assert _losses(runs["elsewhere"])[0] == _losses(runs["static"])[2]


def test_a_sequence_alone_is_not_padded(runs: dict[str, Result]) -> None:
    assert runs["static"].column("padding") == [0.0] * 3


@pytest.mark.slow
def test_replicas_and_tensor_parallel_ranks_train(tmp_path: Path) -> None:
    lines = {
        "replicas": f"{EPOCH} --calculate-per-token-loss --micro-batch-size 2",
        "tensor": f"{EPOCH} --tensor-model-parallel-size 2 --sequence-parallel",
    }
    for run in _run(tmp_path, lines).values():
        assert _losses(run)[-1] < _losses(run)[0]
        assert 0 < run.column("padding")[0] < 0.5


@pytest.mark.slow
def test_an_order_equals_the_static_run_in_that_order(tmp_path: Path) -> None:
    ascending = f"{EPOCH} {V2} --order ascending"
    lines = {
        "static": ascending,
        "dynamic": f"{ascending} --use-dpp",
        "drawn": f"{EPOCH} {V2}",
    }
    runs = _run(tmp_path, lines)
    assert _losses(runs["dynamic"]) == _losses(runs["static"])
    assert runs["dynamic"].hashes == runs["static"].hashes
    assert runs["drawn"].hashes["1"] != runs["static"].hashes["1"], "the order of sums shows"


@pytest.mark.slow
def test_a_static_run_over_our_channels_equals_megatrons(tmp_path: Path) -> None:
    lines = {"own": f"{EPOCH} {V2} --dpp-transport shm", "megatron": f"{EPOCH} {V2}"}
    runs = _run(tmp_path, {k: f"{v} --order ascending" for k, v in lines.items()})
    assert _losses(runs["own"]) == _losses(runs["megatron"])
    assert runs["own"].hashes == runs["megatron"].hashes
