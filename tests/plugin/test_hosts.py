"""Unmodified versions of Megatron-LM: the dynamic pipeline against their own static schedules.

Losses, gradient norms, evaluations and parameters after every step are compared bit by bit.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.plugin.hosts import DYNAMIC, ENGINE, MODEL, NEWEST, PP2X2, VERSIONS, Hosts, records

EXPERTS = (
    f"{PP2X2} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss --disable-bias-linear"
)
CASES = {
    "pp2": (2, "--pipeline-model-parallel-size 2", ""),
    "pp2-x2": (2, PP2X2, ""),
    "pp4-x2": (
        4,
        "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
        "",
    ),
    "tp2-pp2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", ""),
    "dp2-pp2-x2": (4, f"{PP2X2} --overlap-grad-reduce --use-distributed-optimizer", ""),
    "dp2-pp2-gather": (
        4,
        "--pipeline-model-parallel-size 2 --overlap-grad-reduce --use-distributed-optimizer "
        "--overlap-param-gather",
        "",
    ),
    "experts": (2, EXPERTS, ""),
    "experts-ep2": (4, f"{EXPERTS} --expert-model-parallel-size 2", ""),
    "delays": (2, PP2X2, "--dpp-inject jitter:0.5,slow-rank:1:1.5,slow-link:0-1:2ms"),
}
"""Name -> ranks, flags of both runs, and flags of the dynamic one."""
ENGINE_CASES = {
    "engine": (2, f"{PP2X2} {ENGINE}", ""),
    "engine-experts": (2, f"{EXPERTS} --moe-grouped-gemm {ENGINE}", ""),
}
"""The same with Transformer Engine's layers."""


def compare(hosts: Hosts, version: str, case: tuple[int, str, str], folder: Path) -> None:
    num_ranks, flags, dynamic = case
    expected = records(hosts.static(version, num_ranks, flags), num_ranks)
    output = hosts.run(version, num_ranks, f"{flags} {DYNAMIC} {dynamic}", folder / "dynamic")
    assert "an activation takes" in output  # said by the dynamic pipeline when it has measured
    assert records(folder / "dynamic", num_ranks) == expected
    names = [json.loads(line)[0] for line in expected[0]]
    assert names.count("train_step") == 3 and names.count("evaluate") >= 2
    (losses,) = [json.loads(line)[1][0] for line in expected[-1][:1]]
    assert losses["lm loss"]


SLICES = f"{DYNAMIC} --dpp-slice-tokens 16"


def check_slices(hosts: Hosts, version: str, flags: str, folder: Path, *policies: str) -> None:
    """All orders of slices are bitwise equal, and the first loss is that of uncut sequences."""
    uncut = records(hosts.static(version, 2, flags), 2)
    found = []
    for policy in ("dynamic", *policies):
        hosts.run(version, 2, f"{flags} {SLICES} --dpp-policy {policy}", folder / policy)
        found.append(records(folder / policy, 2))
    assert all(each == found[0] for each in found)
    first = [json.loads(each[-1][0])[1][0]["lm loss"][0] for each in (uncut, found[0])]
    assert float.fromhex(first[1]) == pytest.approx(float.fromhex(first[0]), rel=1e-6)
    assert [len(each[-1]) for each in (uncut, found[0])] == [len(uncut[-1])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_sequences_in_slices_of_every_version(hosts: Hosts, version: str, tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --group-query-attention --num-query-groups 2"
    check_slices(hosts, version, flags, tmp_path, "megatron")


PACKED = "--dataloader-inter-document-masking --split 90,10,0 --position-embedding-type rope"
PACKED_CASES = {
    "packed-pp2": (2, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
    "packed-tp2": (
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --micro-batch-size 1",
    ),
    "packed-dp2": (
        4,
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --overlap-grad-reduce "
        "--use-distributed-optimizer",
    ),
}


def corpus(folder: Path, most: int = 90) -> str:
    """Documents of 5 to ``most`` tokens, as Megatron-LM reads them."""
    draw = torch.Generator().manual_seed(5)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=numpy.int32)
    for _ in range(300):
        length = int(torch.randint(5, most, (), generator=draw))
        builder.add_document(torch.randint(1, 127, (length,), generator=draw), [length])
    builder.finalize(str(folder / "corpus.idx"))
    return str(folder / "corpus")


@pytest.mark.slow
@pytest.mark.parametrize("case", PACKED_CASES)
@pytest.mark.parametrize("version", ["core_v0.19.0", NEWEST])
def test_packed_rows_in_slices(hosts: Hosts, version: str, case: str, tmp_path: Path) -> None:
    """The sequences of each row are read from the host's iterators."""
    num_ranks, flags = PACKED_CASES[case]
    model = MODEL.replace("--mock-data", f"--data-path {corpus(tmp_path)}")
    decisions = tmp_path / "decisions"
    arms = {
        "uncut": "", "static": f"{SLICES} --dpp-policy megatron",
        "dynamic": f"{SLICES} --dpp-record {decisions} --dpp-inject jitter:0.5,delay:2ms",
        "replay": f"{SLICES} --dpp-replay {decisions}",
    }  # fmt: skip
    found = {}
    for name, more in arms.items():
        hosts.run(version, num_ranks, f"{flags} {PACKED} {more}", tmp_path / name, model=model)
        found[name] = records(tmp_path / name, num_ranks)
    assert found["dynamic"] == found["static"] == found["replay"]
    uncut, cut = (
        [json.loads(line) for line in found[name][-1] if "train_step" in line]
        for name in ("uncut", "dynamic")
    )
    for one, other in zip(uncut, cut, strict=True):
        losses = [float.fromhex(each[1][0]["lm loss"][0]) for each in (one, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    recorded = [file.read_text() for file in tmp_path.glob("decisions.*")]
    assert recorded and all('"groups"' in text for text in recorded), "no row was cut"


@pytest.mark.slow
def test_packed_rows_in_a_planned_order(hosts: Hosts, tmp_path: Path) -> None:
    """Losses are the host's: those of the first step bit by bit, later ones to rounding."""
    _, flags = PACKED_CASES["packed-pp2"]
    flags += f" --seq-length 512 --max-position-embeddings 512 {PACKED}"
    model = MODEL.replace("--mock-data", f"--data-path {corpus(tmp_path, 500)}")
    arms = {"own": "", "planned": f"{DYNAMIC} --dpp-call-order planned"}
    output = [
        hosts.run(NEWEST, 2, f"{flags} {more}", tmp_path / name, model=model)
        for name, more in arms.items()
    ]
    assert "microbatches run in a planned order (" in output[1]
    own, planned = (
        [json.loads(line)[1][0]["lm loss"] for line in records(tmp_path / name, 2)[-1]
         if "train_step" in line]
        for name in arms
    )  # fmt: skip
    assert own[0] == planned[0]
    for one, other in zip(own, planned, strict=True):
        losses = [float.fromhex(each[0]) for each in (one, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_masks_of_documents_are_not_cut(hosts: Hosts, tmp_path: Path) -> None:
    """The step goes to megatron-core's own schedule, and a line says why."""
    flags = "--pipeline-model-parallel-size 2 --reset-attention-mask"
    more = SLICES.replace("--dpp-strict", "")
    output = hosts.run(NEWEST, 2, f"{flags} {more}", tmp_path / "dynamic")
    assert "megatron-core's own schedule runs: --dpp-slice-tokens 16: attention" in output


def test_numbers_are_those_of_the_static_schedule(hosts: Hosts, tmp_path: Path) -> None:
    rotary = f"{PP2X2} --position-embedding-type rope"
    compare(hosts, NEWEST, (2, rotary, ""), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_and_layout(hosts: Hosts, version: str, case: str, tmp_path: Path) -> None:
    compare(hosts, version, CASES[case], tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
@pytest.mark.parametrize("case", ENGINE_CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_layers_of_transformer_engine(
    hosts: Hosts, version: str, case: str, tmp_path: Path
) -> None:
    compare(hosts, version, ENGINE_CASES[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_resumed_run_continues_bit_by_bit(hosts: Hosts, version: str, tmp_path: Path) -> None:
    flags = f"{PP2X2} --train-iters 4 --save {tmp_path / 'saved'} --save-interval 2"
    static = hosts.static(version, 2, f"{PP2X2} --train-iters 4")
    hosts.run(version, 2, f"{flags} --exit-interval 2 {DYNAMIC}", tmp_path / "first")
    hosts.run(version, 2, f"{flags} --load {tmp_path / 'saved'} {DYNAMIC}", tmp_path / "second")
    for rank, expected in enumerate(records(static, 2)):
        steps = [line for line in expected if "train_step" in line]
        first = [line for line in records(tmp_path / "first", 2)[rank] if "train_step" in line]
        second = [line for line in records(tmp_path / "second", 2)[rank] if "train_step" in line]
        assert (first, second) == (steps[:2], steps[2:])


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_one_pipeline_rank_runs_the_static_schedule(
    hosts: Hosts, version: str, tmp_path: Path
) -> None:
    output = hosts.run(version, 1, "--use-dpp", tmp_path / "dynamic")
    line = "not used, megatron-core's own schedule runs: there is one pipeline rank"
    assert output.count(line) == 1
    assert records(tmp_path / "dynamic", 1) == records(hosts.static(version, 1, ""), 1)
    output = hosts.run(version, 1, DYNAMIC, tmp_path / "strict", fails=True)
    assert "error: --dpp-strict: the dynamic pipeline cannot run this step: there is one" in output


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_microbatches_that_the_static_schedule_refuses(
    hosts: Hosts, version: str, tmp_path: Path
) -> None:
    flags = f"{PP2X2} --global-batch-size 6"  # 3 microbatches on 2 ranks
    hosts.run(version, 2, flags, tmp_path / "static", fails=True)
    assert not list(tmp_path.glob("static.[01]"))
    hosts.run(version, 2, f"{flags} {DYNAMIC}", tmp_path / "dynamic")
    assert len(records(tmp_path / "dynamic", 2)[1]) == 6
