"""Lengths of documents are checked before any process starts."""

from __future__ import annotations

import argparse
import re
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.sim.lengths import read_costs
from megatron.dpp_train.options.validate_sequences import check_sequences
from megatron.dpp_train.preflight.files import check_data, warnings_of_data

LENGTHS = (5, 40, 9, 101)


def index(prefix: Path, lengths: tuple[int, ...] = LENGTHS) -> None:
    """A pair of token files with these lengths."""
    count = len(lengths)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    starts = 2 * numpy.cumsum([0, *lengths[:-1]])
    parts = [numpy.array(lengths, "i4"), starts.astype("i8"), numpy.arange(count + 1)]
    body = b"".join(part.tobytes() for part in parts)
    Path(f"{prefix}.idx").write_bytes(header + body)
    Path(f"{prefix}.bin").write_bytes(bytes(2 * sum(lengths)))


def mark(prefix: Path, *places: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Write the marks of answers: tokens of all documents by their place."""
    marks = numpy.zeros(sum(lengths), "u2")
    marks[list(places)] = 1
    Path(f"{prefix}.bin").write_bytes(marks.tobytes())


def given(prefix: Path, **changes: Any) -> Any:
    values = {
        "sft": True,
        "variable_length": False,
        "variable_lengths": True,
        "seq_length": 100,
        "overlong": "error",
        "packing": "none",
        "packing_budget": 0,
        "length_costs": None,
        "mock_data": False,
        "data_args_path": None,
        "data_path": [str(prefix)],
        "split": "1,0,0",
    }
    return argparse.Namespace(**{**values, **changes})


def checked(prefix: Path, **changes: Any) -> None:
    check_data(given(prefix, **changes), "gpt")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    index(tmp_path / "x_chat_document")
    index(tmp_path / "x_answers_document")
    mark(tmp_path / "x_answers_document", *range(sum(LENGTHS)))
    return tmp_path / "x_chat_document"


def test_a_document_that_just_fits_is_good(chats: Path) -> None:
    checked(chats)


def test_long_documents_are_counted_and_named(chats: Path) -> None:
    with pytest.raises(DataError, match=r"2 of 4 documents exceed --seq-length 30.* 100 tokens"):
        checked(chats, seq_length=30)
    checked(chats, seq_length=30, overlong="cut")
    checked(chats, seq_length=30, overlong="skip")
    with pytest.raises(DataError, match="no document has 2 to 3 tokens"):
        checked(chats, seq_length=2, overlong="skip")


def test_chats_that_are_cut_before_their_answers_are_named(chats: Path) -> None:
    """They trained without a loss, and said NaN nowhere but in the metrics."""
    answers, first = chats.with_name("x_answers_document"), [0, 5, 45, 54]
    cut = {"seq_length": 4, "overlong": "cut"}
    args = given(chats, **cut)
    mark(answers, *(place + 4 for place in first))
    checked(chats, **cut)
    (line,) = warnings_of_data(args, "gpt")
    exceed = f"{chats}: 3 of 4 documents exceed --seq-length 4 and are cut (--overlong cut): "
    assert line == f"{exceed}0 of 4 tokens of answers are left out"
    mark(answers, 5 + 5, 45 + 4, 54 + 5)  # of the second and the last behind what is left
    checked(chats, **cut)
    (line,) = warnings_of_data(args, "gpt")
    why = "and 2 chats, which keep no answer"
    assert line == f"{exceed}2 of 3 tokens of answers are left out, {why}"
    longer = (6, *LENGTHS[1:])
    for prefix in (chats, answers):
        index(prefix, longer)
    mark(answers, 5, 6 + 5, 46 + 5, 55 + 5, lengths=longer)
    with pytest.raises(DataError, match="no chat has an answer within --seq-length 4, to which"):
        checked(chats, **cut)


@pytest.mark.parametrize(
    ("overlong", "what"),
    [
        ("cut", "cut (--overlong cut): 79 of 151 tokens are left out"),
        ("skip", "left out (--overlong skip)"),
    ],
)
def test_what_long_documents_lose_is_said(overlong: str, what: str, tmp_path: Path) -> None:
    prefix = tmp_path / "x_text_document"
    index(prefix)
    args = given(prefix, sft=False, variable_length=True, seq_length=30, overlong=overlong)
    (line,) = warnings_of_data(args, "gpt")
    assert line == f"{prefix}: 2 of 4 documents exceed --seq-length 30 and are {what}"
    args.seq_length = 100
    assert not warnings_of_data(args, "gpt")


def test_a_budget_below_the_longest_sequence_is_refused(chats: Path) -> None:
    packed = {"packing": "even", "packing_budget": 60}
    with pytest.raises(ConfigError, match=r"--packing-budget 60 is below .* 100 tokens"):
        checked(chats, **packed)
    checked(chats, **packed, seq_length=50, overlong="skip")


def test_costs_are_read_before_the_run(chats: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    with pytest.raises(DataError, match=r"--length-costs .*costs.json: expected the file that"):
        checked(chats, length_costs=str(costs))
    costs.write_text('{"fixed": 0.1, "per_token": [1, 2, 3], "per_square": [0, 0, 0]}')
    checked(chats, length_costs=str(costs))
    assert read_costs(str(costs)).total([2]) == pytest.approx(12.3)


def test_tokens_without_marks_of_answers_are_refused(tmp_path: Path) -> None:
    index(tmp_path / "x_text_document")
    with pytest.raises(DataError, match="preprocess --sft"):
        checked(tmp_path / "x_text_document")
    index(tmp_path / "y_chat_document")
    with pytest.raises(DataError, match="y_answers_document"):
        checked(tmp_path / "y_chat_document")


def of_sequences(**changes: Any) -> Any:
    """Settings of a run over chats, before they are checked."""
    excluded = (
        "mock_data", "rampup_batch_size", "full_validation", "decrease_batch_size_if_needed",
        "reset_position_ids", "reset_attention_mask", "dataloader_fast_cache_load",
        "dataloader_defer_npy_index_mmap", "per_dataset_sequences_path", "deepspeed_zero_stage",
    )  # fmt: skip
    usual = {
        "sft": True, "variable_length": False, "dataloader_type": "single", "seq_length": 64,
        "context_parallel_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False,
        "packing": "none", "packing_budget": None, "micro_batch_size": 1, "mtp_num_layers": None,
        "transformer_impl": "local", "dpp_length_buckets": "off", "num_experts": None,
        "pipeline_model_parallel_size": 1, "use_dpp": True, "dpp_transport": "auto",
    }  # fmt: skip
    return argparse.Namespace(**dict.fromkeys(excluded), **usual | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dpp_length_buckets": "wide"}, "wide: expected off, geometric, or ascending lengths"),
        ({"dpp_length_buckets": "64,32"}, "64,32: expected off, geometric, or ascending lengths"),
        ({"dpp_length_buckets": "9" * 5000}, "9: expected off, geometric, or ascending lengths"),
        ({"dpp_length_buckets": "\u0663\u0662,64"}, ",64: expected off, geometric, or ascending"),
        ({"dpp_length_buckets": "32,128"}, "128 is above the longest sequence, 64"),
        ({"dpp_length_buckets": "30,60", "context_parallel_size": 2}, "30 is no multiple of 4"),
        ({"packing": "even"}, "packed rows run without CUDA graphs"),
        ({"num_experts": 4}, "routers would send padding to experts"),
    ],
)
def test_buckets_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    args = of_sequences(dpp_length_buckets="32,64")
    check_sequences(args)
    assert args.length_buckets == (32, 64)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_sequences(of_sequences(**{"dpp_length_buckets": "32,64"} | changes))


def test_a_packed_row_holds_what_the_longest_document_is_cut_to(chats: Path) -> None:
    cut = {"seq_length": 50, "overlong": "cut", "packing": "ffd"}
    checked(chats, **cut, packing_budget=50)
    with pytest.raises(ConfigError, match=r"--packing-budget 49 is below .*, 50 tokens"):
        checked(chats, **cut, packing_budget=49)


def test_geometric_buckets_grow_by_the_root_of_two() -> None:
    geometric = DppConfig(length_buckets="geometric")
    found = geometric.buckets(16384)
    assert found[:6] == (256, 384, 512, 768, 1024, 1536) and found[-1] == 16384
    assert len(found) == 13 and all(length % 128 == 0 for length in found)
    assert geometric.buckets(100) == (100,)
    assert geometric.buckets(1000, 4) == (256, 384, 512, 768, 1000)
    assert DppConfig().buckets(1000) == ()


def test_further_tokens_of_packed_and_cut_rows_are_refused() -> None:
    """megatron-core looks for the next token in a document's part on the same rank."""
    wrong = of_sequences(packing="ffd", context_parallel_size=2, mtp_num_layers=1)
    with pytest.raises(ConfigError, match="does not go with --mtp-num-layers 1"):
        check_sequences(wrong)
    args = of_sequences(packing="ffd", context_parallel_size=2)
    check_sequences(args)
    assert args.packing_budget == 64
