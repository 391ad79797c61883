"""Estimates against what runs on GPUs measured: milliseconds of a step, MiB of the fullest rank.

The rates of matrix products, memory, collectives and FSDP2's launches were fitted to some of these
times, so tolerances are what the estimates are off today, rounded up.
"""

from __future__ import annotations

import pytest

from megatron.dpp_train.cost import named_devices
from megatron.dpp_train.cost.estimate import estimate
from megatron.dpp_train.cost.flags import Given, shape_of
from megatron.dpp_train.cost.pipeline import predict
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.presets.flags import from_argv

CAUSAL = "--bf16 --hidden-dropout 0 --attention-dropout 0 "
MODEL = (
    f"{CAUSAL}--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --transformer-impl local --micro-batch-size 8 "
    "--padded-vocab-size 50304 "
)
V2 = "--num-virtual-stages-per-pipeline-rank 2 "
V4 = "--num-virtual-stages-per-pipeline-rank 4 "
WORDS = "--padded-vocab-size 50304 "
GRAPHS = "--dpp-cuda-graphs on "
OFF, ON = "--use-dpp --dpp-cuda-graphs off ", f"--use-dpp {GRAPHS}"
PP2, TP2 = "--pipeline-model-parallel-size 2 ", "--tensor-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 "
TE = "--transformer-impl transformer_engine "
LAYOUT, CAP = "--pipeline-model-parallel-layout ", " --dpp-activation-cap "
B16, B32, B64, B128 = (f"--global-batch-size {n} " for n in (16, 32, 64, 128))
PP2_64 = f"{MODEL}{PP2}{B64}"
FOUR = (
    f"{CAUSAL}--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --seq-length 2048 "
    "--max-position-embeddings 2048 --transformer-impl local --micro-batch-size 2 "
    f"{B16}--padded-vocab-size 4096 "
)
LLAMA = (
    f"{CAUSAL}--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu "
    "--group-query-attention --num-query-groups 8 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights "
    f"--cross-entropy-loss-fusion {TE}--no-gradient-accumulation-fusion "
)
LONG = (
    f"{LLAMA}--num-layers 4 --seq-length 65536 --max-position-embeddings 65536 "
    "--padded-vocab-size 32768 --micro-batch-size 1 --global-batch-size 4 "
)
SHORT = f"{LLAMA}--seq-length 2048 --max-position-embeddings 2048 --padded-vocab-size 128256 "
ALL, ONE = f"{SHORT}--num-layers 32 {B32}", "--micro-batch-size 1 "
TRAIN = (
    f"{CAUSAL}--transformer-impl local --padded-vocab-size 51200 --cross-entropy-loss-fusion {B128}"
    "--num-layers 24 --num-attention-heads 16 "
)
SMALL = (
    f"{TRAIN}--hidden-size 1024 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 8 "
)
LARGE = (
    f"{TRAIN}--hidden-size 2048 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 4 "
)
DPP2, DPP4 = f"--use-dpp {PP2}", f"--use-dpp {PP4}"
EAGER2, EAGER4 = OFF + PP2, OFF + PP4
SEQ = TP2 + "--sequence-parallel "
ZERO1, ZERO3 = "--use-distributed-optimizer ", "--use-torch-fsdp2 "
ZERO2 = f"{ZERO3}--torch-fsdp2-no-reshard-after-forward "
CUT_4 = f"{EAGER4}{LAYOUT}Ettt|tttt|ttt|ttt|ttt|ttt|ttt|ttL{CAP}megatron "
PLANNED_4 = f"{DPP4}{LAYOUT}Ettt|tttt|tttt|ttt|tttt|ttt|ttt|L{CAP}2p "

EIGHT = "Ettt|ttttt|ttttt|ttttt|ttttt|tttt|tttt|tL"
STEPS = [
    ("H200", 2, PP2_64, 364, 0.06),
    ("H200", 2, PP2_64 + V2, 326, 0.02),
    ("H200", 2, PP2_64 + OFF, 339.5, 0.02),
    ("H200", 2, MODEL + PP2 + V2 + TE + B128, 786.3, 0.02),
    ("H200", 2, MODEL + PP2 + OFF + V2 + TE + B128, 904.8, 0.13),
    ("H100", 2, LONG + ZERO1 + "--context-parallel-size 2", 3254, 0.02),
    ("H100", 2, LONG + PP2 + V2, 3755, 0.03),
    ("H100", 2, LONG + DPP2 + V2 + "--dpp-policy megatron", 3870, 0.03),
    ("H100", 4, ALL + ZERO3 + "--micro-batch-size 2", 1836, 0.03),
    ("H100", 4, ALL + ONE + ON + PP4 + LAYOUT + EIGHT, 1755, 0.02),
    ("H100", 2, SHORT + ONE + B16 + ON + PP2 + LAYOUT + "Ettt|tt|tt|tL --num-layers 8", 597, 0.03),
    ("H200", 2, MODEL + B128, 541.7, 0.11),
    ("H200", 1, SMALL + GRAPHS, 790.2, 0.02),
    ("H200", 2, SMALL + GRAPHS, 406.7, 0.03),
    ("H200", 2, SMALL + GRAPHS + ZERO1, 407.3, 0.04),
    ("H200", 2, SMALL + GRAPHS + SEQ, 667.3, 0.03),
    ("H200", 2, SMALL + DPP2 + V2, 466, 0.05),
    ("H200", 2, SMALL + DPP2 + LAYOUT + "Ettttttt|ttttttttt|tttttttt|L", 430, 0.03),
    ("H200", 2, SMALL + ZERO2, 944.2, 0.02),
    ("H200", 2, SMALL + ZERO3, 1077.2, 0.02),
    ("H200", 1, LARGE + GRAPHS, 4355.8, 0.05),
    ("H200", 2, LARGE + GRAPHS, 2197, 0.05),
    ("H200", 2, LARGE + GRAPHS + SEQ, 2840.6, 0.06),
    ("H200", 2, LARGE + EAGER2 + V2, 2399.1, 0.03),
    ("H200", 2, LARGE + EAGER2 + LAYOUT + "Ettt|tttt|tttt|tttt|ttt|ttt|ttt|L", 2259.3, 0.02),
    ("H200", 2, SMALL + GRAPHS + "--overlap-grad-reduce", 401.2, 0.02),
    ("H200", 2, SMALL + DPP2 + LAYOUT + f"Ettttttt|ttttttt|ttttttt|tttL{CAP}1.5p", 419.8, 0.03),
    ("H200", 2, LARGE + GRAPHS + B32, 572.2, 0.06),
    ("H200", 4, SMALL + GRAPHS, 214.4, 0.05),
    ("H200", 4, SMALL + GRAPHS + TP2, 309.9, 0.08),
    ("H200", 4, SMALL + GRAPHS + SEQ, 346.3, 0.06),
    ("H200", 4, LARGE + GRAPHS, 1126.6, 0.05),
    ("H200", 4, LARGE + GRAPHS + TP2, 1368.7, 0.06),
    ("H200", 4, LARGE + GRAPHS + SEQ, 1441.8, 0.05),
    ("H200", 4, LARGE + CUT_4, 1250, 0.04),
    ("H200", 4, SMALL + PLANNED_4, 235.3, 0.02),
    ("H200", 2, SMALL + GRAPHS + TP2, 604.1, 0.07),
    ("H200", 2, LARGE + GRAPHS + TP2 + B32, 687.7, 0.05),
    ("H200", 2, LARGE + GRAPHS + TP2, 2757.3, 0.04),
]  # fmt: skip

CUT = f"{CAP}megatron {LAYOUT}Et|tt|tt|tt|ttt|ttt|ttt|L"
PASSES = [
    (4, FOUR + PP4 + ON, 115.5),
    (4, FOUR + PP4 + V2, 124.7),
    (4, FOUR + PP4 + V2 + GRAPHS, 113.1),
    (4, FOUR + PP4 + V4 + GRAPHS, 109.7),
    (4, FOUR + PP4 + ON + V2, 105.3),
    (4, FOUR + PP4 + OFF + V2, 127),
    (4, FOUR + PP4 + V2 + GRAPHS + WORDS, 165.2),
    (4, FOUR + PP4 + V4 + GRAPHS + WORDS, 163.2),
    (4, FOUR + PP4 + ON + WORDS + CUT, 121.3),
    (2, FOUR + GRAPHS + TP2, 241.1),
    (2, FOUR + GRAPHS + SEQ, 267.8),
]

MEMORY = [
    (2, MODEL + B128, 8613.9, 0.02),
    (2, MODEL + TP2 + B64, 5130.4, 0.02),
    (2, MODEL + SEQ + B64, 4360.9, 0.03),
    (2, MODEL + SEQ + B64 + "--recompute-activations", 4354.8, 0.03),
    (2, PP2_64 + OFF, 10142.9, 0.02),
    (2, MODEL + GRAPHS + B128 + "--padded-vocab-size 51200", 9031.7, 0.06),
    (1, SMALL + GRAPHS, 10629.1, 0.05),
    (2, SMALL + GRAPHS + ZERO1, 10629.1, 0.05),
    (2, SMALL + GRAPHS + SEQ, 5498.9, 0.08),
    (2, SMALL + ZERO2, 10977.3, 0.02),
    (2, SMALL + ZERO3, 10403.8, 0.02),
    (1, LARGE + GRAPHS, 16977.9, 0.05),
    (2, LARGE + GRAPHS + SEQ, 8683.5, 0.07),
    (2, LARGE + EAGER2 + V2, 18032.6, 0.02),
    (4, SMALL + GRAPHS + TP2, 6307.8, 0.08),
    (4, LARGE + GRAPHS + TP2, 10291.2, 0.06),
    (4, LARGE + CUT_4, 21565.4, 0.03),
    (4, SMALL + PLANNED_4, 22231.0, 0.07),
]


def shape(number: int, flags: str) -> RunShape:
    return shape_of(Given(from_argv(flags.split())), number, number, on_gpu=True, arch="gpt")


@pytest.mark.parametrize(("gpu", "number", "flags", "measured_ms", "tolerance"), STEPS)
def test_time_of_a_step(
    gpu: str, number: int, flags: str, measured_ms: float, tolerance: float
) -> None:
    found = estimate(shape(number, flags), named_devices(gpu, number).device)
    assert found.seconds * 1e3 == pytest.approx(measured_ms, rel=tolerance)


@pytest.mark.parametrize(("number", "flags", "measured_ms"), PASSES)
def test_time_of_forwards_and_backwards(number: int, flags: str, measured_ms: float) -> None:
    found = predict(shape(number, flags), named_devices("H200", number).device)
    assert found.seconds * 1e3 == pytest.approx(measured_ms, rel=0.055)


@pytest.mark.parametrize(("number", "flags", "measured_mib", "tolerance"), MEMORY)
def test_activations_and_workspace_of_the_fullest_rank(
    number: int, flags: str, measured_mib: float, tolerance: float
) -> None:
    ranks = estimate(shape(number, flags), named_devices("H200", number).device).ranks
    fullest = max(rank.activations + rank.workspace for rank in ranks)
    assert fullest / 2**20 == pytest.approx(measured_mib, rel=tolerance)


@pytest.mark.parametrize(("flags", "traced"), [(OFF, 0.121), (OFF + V2, 0.123), (ON, 0.212)])
def test_bubble_with_and_without_graphs(flags: str, traced: float) -> None:
    found = predict(shape(2, PP2_64 + flags), named_devices("H200", 2).device)
    assert found.bubble == pytest.approx(traced, abs=0.03)
