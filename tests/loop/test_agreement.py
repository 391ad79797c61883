"""Unequal arguments or versions end every rank at the start, with both values."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from megatron.dpp.errors import VersionMismatch
from megatron.dpp_train.initialize import check_agreement, description, differences


def outcomes(*ranks: Namespace) -> list[str]:
    """Message of each rank's check; empty when it found nothing."""
    store = HashStore()

    def check(rank: int) -> str:
        try:
            check_agreement(ranks[rank], rank, len(ranks), store)
        except VersionMismatch as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(check, range(len(ranks))))


def test_equal_arguments_pass_and_paths_may_differ() -> None:
    one = Namespace(lr=0.1, data_path=["/a"], save="/a", rank=0, trace_dir="/x")
    other = Namespace(lr=0.1, data_path=["/b"], save="/b", rank=1, trace_dir="/y")
    assert outcomes(one, other, other) == ["", "", ""]


def test_a_difference_is_named_on_every_rank() -> None:
    said = outcomes(Namespace(lr=0.1), Namespace(lr=0.1), Namespace(lr=0.2))
    assert len(set(said)) == 1
    assert "--lr is 0.1 on rank 0 and 0.2 on rank 2" in said[0]


def test_versions_are_compared() -> None:
    own = description(Namespace())
    assert {"Python", "torch", "megatron-core", "megatron.dpp"} <= set(own)
    text = differences(own, {**own, "torch": "1.0"}, 3, "node7")
    assert text == f"torch is 1.0 on rank 0 and {own['torch']} on rank 3 (node7)"


def test_many_differences_are_counted() -> None:
    text = differences({f"--{i}": "1" for i in range(9)}, {}, 1, "h")
    assert "4 more differ" in text and "--0 is not known on rank 0" in text
    assert "more" not in differences({f"--{i}": "1" for i in range(5)}, {}, 1, "h")
    assert differences({}, {"--lr": "1"}, 1, "h") == (
        "--lr is 1 on rank 0 and not known on rank 1 (h)"
    )
