"""The optimizer's step in a few kernels gives the results of megatron-core's many kernels."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as core
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from megatron.dpp_train.optimizer.fused_step import (
    clipping,
    copy,
    divisor,
    fused_step,
    grad_norm,
    l2_norm,
    scale,
)

SHAPES = ((3, 5), (7,), ())


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's functions as without Transformer Engine and Apex, whose own stay in use."""
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    for module in (clip_grads, core):
        monkeypatch.setattr(module, "multi_tensor_scale_impl", local_multi_tensor_scale)


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def test_the_norm_of_all_tensors() -> None:
    grads = tensors(0)
    norm, per_tensor = l2_norm(None, 0, None, [grads], False)
    expected = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
    assert per_tensor is None and norm.shape == (1,)
    assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_the_norm_over_ranks_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_two_ranks(squares: torch.Tensor, group: Any) -> None:
        assert group == "both"
        squares *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", of_two_ranks)
    grads = tensors(0)
    norm = grad_norm(None, grads, grad_stats_parallel_group="both")
    expected = math.sqrt(2 * sum(grad.double().square().sum().item() for grad in grads))
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_gradients_clips_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise tied embeddings and replicated parameters drift apart."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda squares, group: squares.add_(4.0))
    norm = grad_norm(None, [])
    assert isinstance(norm, torch.Tensor) and norm.item() == 2.0


def test_other_norms_are_megatron_cores() -> None:
    assert grad_norm(lambda grads, norm_type, group: 3.0, tensors(0), math.inf) == 3.0


def test_gradients_within_the_norm_and_of_no_known_norm_are_not_clipped() -> None:
    def of(norm: float) -> float:
        return divisor(2.0, torch.tensor(norm, dtype=torch.float64)).item()

    assert of(0.0) == of(1.99) == of(math.nan) == 1.0
    assert of(8.0) == pytest.approx(4.0, rel=1e-6) and of(math.inf) == math.inf


@pytest.mark.parametrize("norm", [4.0, torch.tensor(4.0, dtype=torch.float64)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_clipping_divides(kind: Any, norm: Any) -> None:
    """In Adam's own step too, with and without a norm that was read. One has no gradient."""
    parameters = [torch.nn.Parameter(t) for t in tensors(5)]
    unused = torch.nn.Parameter(torch.ones(2))
    for parameter, grad in zip(parameters, tensors(6), strict=True):
        parameter.grad = grad
    inner = kind(parameters, lr=0.1)
    expected = 0.5 if kind is torch.optim.SGD else 1.0
    with clipping([inner]):
        core.clip_grad_by_total_norm_fp32([*parameters, unused], 2.0, norm)
        if kind is torch.optim.AdamW:
            assert inner.grad_scale.item() == pytest.approx(2.0, rel=1e-6)
    assert not hasattr(inner, "grad_scale")
    for parameter, grad in zip(parameters, tensors(6), strict=True):
        torch.testing.assert_close(parameter.grad, grad * expected)


def test_sharded_gradients_are_clipped_and_measured_as_megatron_core_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm of local shards would be another on each rank."""
    asked: list[Any] = []

    def clip(
        parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False
    ) -> None:
        asked.append((parameters, max_norm, total_norm, use_decoupled_grad))

    path = "megatron.dpp_train.optimizer.fused_step._sharded"
    monkeypatch.setattr(path, lambda grads: True)
    monkeypatch.setattr(core, "clip_grad_by_total_norm_fp32", clip)
    parameters = [torch.nn.Parameter(t) for t in tensors(5)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    inner = torch.optim.AdamW(parameters, lr=0.1)
    with clipping([inner]):
        core.clip_grad_by_total_norm_fp32(parameters, 2.0, 4.0, use_decoupled_grad=True)
        assert not hasattr(inner, "grad_scale")
    assert asked == [(parameters, 2.0, 4.0, True)]
    assert grad_norm(lambda grads, norm_type, group: (norm_type, group), [], 2, "g") == (2, "g")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scaling_in_place_and_into_others(dtype: torch.dtype) -> None:
    grads, expected = tensors(1), tensors(1)
    local_multi_tensor_scale(0, None, [expected, expected], 0.25)
    scale(None, 0, None, [grads, grads], 0.25)
    others, expected_others = tensors(2, dtype), tensors(2, dtype)
    for factor in (1.0, 0.5):
        scale(None, 0, None, [grads, others], factor)
        local_multi_tensor_scale(0, None, [expected, expected_others], factor)
        assert all(map(torch.equal, grads + others, expected + expected_others))


def test_copying_changes_the_dtype() -> None:
    source, target = tensors(3), tensors(4, torch.bfloat16)
    copy(None, this=source, that=target, overflow_buf=None)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(source, target, strict=True))
    copy(None, [], [])


SHARDS = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from megatron.dpp_train.optimizer.fused_step import copy, scale
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
mesh = DeviceMesh("cpu", [0])
source, target = ([DTensor.from_local(torch.full((3,), x), mesh)] for x in (2.0, 0.0))
copy(None, this=source, that=target)
assert target[0].to_local().tolist() == [2.0] * 3
scale(None, 0, None, [source, target], 2.0)
assert target[0].to_local().tolist() == [4.0] * 3
dist.destroy_process_group()
"""


def test_fsdp2s_shards_are_copied_into_shards(tmp_path: Path) -> None:
    """``_foreach_copy_`` takes no DTensors. Runs in a process of its own, as forked tests must not
    collect gloo's objects.
    """
    subprocess.run([sys.executable, "-c", SHARDS, str(tmp_path / "store")], check=True, timeout=120)


def make(device: str) -> tuple[Any, list[torch.nn.Parameter]]:
    """megatron-core's optimizer around PyTorch's, as one that holds another."""
    parameters = [torch.nn.Parameter(t.to(device)) for t in tensors(5)]
    inner = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.01)
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]), parameters


def test_nothing_changes_on_a_cpu() -> None:
    optimizer, _ = make("cpu")
    before = clip_grads.l2_norm_impl
    empty = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": []}]))  # a shard's
    with fused_step(optimizer), fused_step(SimpleNamespace(optimizer=None)), fused_step(empty):
        assert clip_grads.l2_norm_impl is before
        assert not optimizer.chained_optimizers[0].optimizer.param_groups[0]["fused"]


class OnGpu(torch.nn.Parameter):
    """A parameter that says that it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def test_adam_is_fused_for_one_step_from_any_loaded_state() -> None:
    """A fused kernel wants counts of fp32 where the parameters are, and saves no setting."""
    stepped, elsewhere, fresh = (
        OnGpu(torch.ones(2, device=device)) for device in ("cpu", "meta", "cpu")
    )
    adam = torch.optim.AdamW([stepped, elsewhere], lr=0.1, foreach=True)
    adam.add_param_group({"params": [fresh], "foreach": None})
    count = torch.tensor(3.0, dtype=torch.float64)
    adam.state[stepped]["step"], adam.state[elsewhere]["step"] = count, count
    with (
        pytest.raises(ValueError, match="of the step"),
        fused_step(SimpleNamespace(optimizer=adam)),
    ):
        assert [(each["fused"], each["foreach"]) for each in adam.param_groups] == [
            (True, False)
        ] * 2
        assert adam.state[stepped]["step"].dtype == torch.float32
        assert adam.state[stepped]["step"].item() == 3.0
        assert adam.state[elsewhere]["step"].is_meta
        raise ValueError("of the step")
    assert [(each["fused"], each["foreach"]) for each in adam.param_groups] == [
        (None, True), (None, None)
    ]  # fmt: skip
    assert fresh not in adam.state, "a first step would take it for its own"


def test_an_optimizer_with_a_parameter_on_the_host_is_not_fused() -> None:
    on_gpu, on_host = OnGpu(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    for parameters, fused in (([on_gpu], True), ([on_gpu, on_host], False)):
        adam = torch.optim.AdamW([{"params": [each]} for each in parameters], lr=0.1)
        with fused_step(SimpleNamespace(optimizer=adam)):
            assert {bool(group["fused"]) for group in adam.param_groups} == {fused}


@pytest.mark.gpu
def test_fused_adam_goes_on_from_a_loaded_state_and_is_not_saved() -> None:
    def run(fused: bool) -> list[torch.nn.Parameter]:
        optimizer, parameters = make("cuda")
        inner = optimizer.chained_optimizers[0].optimizer
        for step in range(6):
            for parameter, grad in zip(parameters, tensors(10 + step), strict=True):
                parameter.grad = grad.cuda()
            if fused:
                with fused_step(optimizer):
                    inner.step()
            else:
                inner.step()
            state = inner.state_dict()
            assert not state["param_groups"][0]["fused"]
            if step == 2:  # as from a file
                for each in state["state"].values():
                    each["step"] = each["step"].cpu()
                inner.load_state_dict(state)
        return parameters

    for ours, theirs in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_engine")
def test_norm_and_copies_are_replaced_on_a_gpu() -> None:
    optimizer, parameters = make("cuda")
    for parameter, grad in zip(parameters, tensors(6), strict=True):
        parameter.grad = grad.cuda()
    names = (clip_grads.l2_norm_impl, core._multi_tensor_copy_this_to_that)
    with fused_step(optimizer):
        assert clip_grads.l2_norm_impl is not names[0]
        clip_grads.clip_grad_by_total_norm_fp32(parameters, 0.5, total_norm=1.0)
    for parameter, grad in zip(parameters, tensors(6), strict=True):
        torch.testing.assert_close(parameter.grad, (grad * (0.5 / (1.0 + 1e-6))).cuda())
    assert names == (clip_grads.l2_norm_impl, core._multi_tensor_copy_this_to_that)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_engine")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_clipping_within_a_step_does_not_wait_for_the_norm(kind: Any) -> None:
    def run(fused: bool) -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(t.cuda()) for t in tensors(5)]
        inner = kind(parameters, lr=0.1)
        optimizer = SimpleNamespace(optimizer=inner)
        for step in range(3):
            for parameter, grad in zip(parameters, tensors(10 + step), strict=True):
                parameter.grad = grad.cuda()
            # Adam would not notice if all gradients were divided by one number.
            total = torch.tensor((0.25, 4.0, 1.0)[step], dtype=torch.float64, device="cuda")
            if fused:
                if step == 2:  # nothing has to be initialised any more
                    torch.cuda._sleep(1_000_000_000)
                with fused_step(optimizer):
                    core.clip_grad_by_total_norm_fp32(parameters, 0.5, total)
                    inner.step()
                assert step < 2 or not torch.cuda.current_stream().query()
                assert not hasattr(inner, "grad_scale")
            else:
                core.clip_grad_by_total_norm_fp32(parameters, 0.5, total.item())
                inner.step()
        return parameters

    for ours, theirs in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
