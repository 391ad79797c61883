"""The reductions of one call, and the host's say in them. ``tests/plugin/hosts_like`` compares the
numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.dpp.core import grad_sync
from megatron.dpp.errors import ConfigError
from tests.runtime.test_stage import Chunk, config_with, stage_of


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_sync, "DistributedDataParallel", Chunk)


def groups_of(chunk: Chunk) -> list[Any]:
    return chunk.bucket_groups + chunk.expert_parallel_bucket_groups


def test_complete_chunks_start_their_own_reductions_in_one_order() -> None:
    chunks = [Chunk(config_with()), Chunk(config_with())]
    stage = stage_of(chunks)
    with pytest.raises(AssertionError, match="chunk 0 is complete before chunk 1"):
        stage.chunk_complete(0)
    stage.chunk_complete(1)
    assert [chunk.started() for chunk in chunks] == [[[], []], [[False], [False]]]
    with pytest.raises(AssertionError, match="chunk 1 is complete before chunk 2"):
        stage.chunk_complete(1)
    stage.chunk_complete(0)
    assert [chunk.started() for chunk in chunks] == [[[False], [False]]] * 2


@pytest.mark.parametrize(
    ("by_call", "by_model", "given", "started"),
    [
        (True, False, {}, [True]),
        (False, True, {}, [True]),
        (False, False, {}, [False]),
        (True, False, {"instances": 2}, []),  # the first step is reduced at the end alone
        (True, False, {"instances": 2, "first": False}, [True]),
    ],
)
def test_the_call_or_the_model_asks_for_reductions_everywhere(
    by_call: bool, by_model: bool, given: dict[str, Any], started: list[bool]
) -> None:
    chunk = Chunk(config_with(), **given)
    chunk.force_all_reduce = by_model
    stage_of([chunk], force_all_reduce=by_call).chunk_complete(0)
    assert chunk.started() == [started] * 2


@pytest.mark.parametrize("listed", [True, False])
def test_a_users_own_reduction_takes_the_place_of_ours(listed: bool) -> None:
    given: list[str] = []
    sync: Any = [lambda _: given.append("0"), lambda _: given.append("1")]
    config = config_with(grad_sync_func=sync if listed else sync[0])
    chunks = [Chunk(config), Chunk(config)]
    stage = stage_of(chunks)
    for chunk in (1, 0):
        stage.chunk_complete(chunk)
    assert given == (["1", "0"] if listed else ["0", "0"])
    assert [chunk.started() for chunk in chunks] == [[[], []]] * 2


@pytest.mark.parametrize("names", [["0", "1"], ["all"], []])
def test_a_stage_holds_reductions_back_from_its_beginning_to_its_end(names: list[str]) -> None:
    """Within the functions of the config, if there are any, and without them."""
    told: list[str] = []

    @contextlib.contextmanager
    def held(name: str) -> Iterator[None]:
        told.append(f"hold {name}")
        yield
        told.append(f"free {name}")

    each: list[Any] = [functools.partial(held, name) for name in names]
    functions: Any = each if len(each) > 1 else each[0] if each else None
    config = config_with(no_sync_func=functions, finalize_model_grads_func=None)
    chunks = [Chunk(config), Chunk(config)]
    stage = stage_of(chunks)
    stage.open()
    assert told[2 * len(names) :] == [f"hold {name}" for name in names], "after a trial of them"
    groups = [group for chunk in chunks for group in groups_of(chunk)]
    assert not any(group.is_last_microbatch for group in groups)
    told.clear()
    stage.finish()
    assert told == [f"free {name}" for name in reversed(names)]
    assert all(group.is_last_microbatch for group in groups)


def test_a_host_that_holds_all_calls_reductions_back_reduces_itself() -> None:
    """Also where its functions are set; what it holds back stays so after the call."""
    chunk = Chunk(config_with(no_sync_func=contextlib.nullcontext))
    held, free = groups_of(chunk)
    held.is_last_microbatch = False
    stage = stage_of([chunk])
    stage.open()
    stage.chunk_complete(0)
    stage.close()
    assert chunk.started() == [[], [False]]
    assert (held.is_last_microbatch, free.is_last_microbatch) == (False, True)


@pytest.mark.parametrize(("by_function", "times"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("first", [True, False])
def test_where_the_host_finishes_gradients_ddp_counts_them_over_several_calls(
    by_function: bool, times: int, first: bool
) -> None:
    """As often as under megatron-core's schedule: its count is that of an earlier step."""
    config = config_with(finalize_model_grads_func=None)
    chunk = Chunk(config, first=first)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        for group in groups_of(chunk):
            group.is_last_microbatch = False
        yield
        for group in groups_of(chunk):
            group.is_last_microbatch = True

    config.no_sync_func = no_sync if by_function else None
    stage = stage_of([chunk], num_microbatches=3, force_all_reduce=True)
    stage.open()
    stage.chunk_complete(0)
    stage.close()
    assert chunk.started() == [[], []]
    for group in groups_of(chunk):
        expected = [(id(p), True) for p in group.params] * (0 if first else times)
        assert sorted((id(p), everywhere) for p, everywhere in group.counted) == sorted(expected)


def test_gradients_are_not_added_to_a_reduction_that_runs() -> None:
    chunk = Chunk(config_with())
    chunk.bucket_groups[0].grad_reduce_handle = object()
    with pytest.raises(ConfigError, match="an earlier call are still being reduced"):
        stage_of([chunk]).open()
    stage_of([chunk], forward_only=True).open()


def test_ddp_is_found_below_a_hosts_wrapper_and_in_parts_of_a_chunk() -> None:
    first, second = Chunk(config_with()), Chunk(config_with())
    wrapper, parts = torch.nn.Module(), torch.nn.ModuleList([first, torch.nn.ReLU(), second])
    wrapper.module = first
    for chunk, found in ((first, [first]), (wrapper, [first]), (parts, [first, second])):
        assert grad_sync.replicated(chunk) == found
    assert grad_sync.replicated(torch.nn.ReLU()) == []
