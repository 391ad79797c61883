"""The reductions of one call where the host has a say in them. ``tests/plugin/hosts_like`` compares
the numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from megatron.dpp.core import grad_sync
from megatron.dpp.errors import ConfigError
from tests.runtime.test_stage import Chunk, config_with, stage_of


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_sync, "DistributedDataParallel", Chunk)


def test_a_host_that_holds_all_calls_reductions_back_reduces_itself() -> None:
    """Also where its functions are set; what it holds back stays so after the call."""
    chunk = Chunk(config_with(no_sync_func=contextlib.nullcontext))
    held, free = chunk.bucket_groups[0], chunk.expert_parallel_bucket_groups[0]
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
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        for group in groups:
            group.is_last_microbatch = False
        yield
        for group in groups:
            group.is_last_microbatch = True

    config.no_sync_func = no_sync if by_function else None
    stage = stage_of([chunk], num_microbatches=3)
    stage.open()
    stage.chunk_complete(0)
    stage.close()
    assert chunk.started() == [[], []]
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        assert sorted(map(id, (p for p, _ in group.counted))) == sorted(
            [id(p) for p in group.params] * (0 if first else times)
        )


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
