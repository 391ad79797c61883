"""Constants of the cost model: value, unit, and the measurement behind each.

"H200 runs" are those of docs/benchmarks/scaling-h200.md ("Times") and schedule-h200.md; the tests
in ``tests/cost/test_measured.py`` hold the model to them. A new GPU is one row of :data:`GPUS`.
"""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """Figures of one kind of GPU: FLOP/s of matrix products, bytes/s of memory, bytes/s of a link
    to a GPU of the same node (one way), and memory in GiB.
    """

    flops: float
    memory_rate: float
    link: float
    memory_gib: float


GPUS = {
    "GB200": Gpu(1.8e15, 8e12, 7.2e11, 184),
    "B200": Gpu(1.6e15, 8e12, 7.2e11, 179),
    "H200": Gpu(7.1e14, 4.8e12, 3.6e11, 140),
    "H100": Gpu(7.1e14, 3.3e12, 3.6e11, 80),
    "H800": Gpu(7.1e14, 3.3e12, 1.6e11, 80),
    "H20": Gpu(1.1e14, 4.0e12, 3.6e11, 95),
    "A800": Gpu(2.2e14, 2.0e12, 1.6e11, 80),
    "A100": Gpu(2.2e14, 2.0e12, 2.4e11, 80),
    "MI300X": Gpu(9.4e14, 5.3e12, 3.5e11, 192),
    "L40S": Gpu(2.6e14, 8.6e11, 2e10, 45),
    "L40": Gpu(1.3e14, 8.6e11, 2e10, 45),
    "A6000": Gpu(1.1e14, 7.7e11, 2e10, 48),
    "A10": Gpu(9e13, 6.0e11, 2e10, 22),
    "RTX 5090": Gpu(1.5e14, 1.8e12, 2e10, 31),
    "RTX 4090": Gpu(1.2e14, 1.0e12, 2e10, 24),
    "RTX 3090": Gpu(5.1e13, 9.4e11, 2e10, 24),
    "V100": Gpu(9e13, 9e11, 1.2e11, 32),
    "T4": Gpu(4.7e13, 3.2e11, 1.2e10, 15),
}
"""FLOP/s: 72 % of the dense 16-bit peak, as H200 runs reach. Rates: data sheets, links at 80 %.

Dense peaks in TFLOP/s that accumulate in fp32: 2500 (GB200, a half of the data sheet's pair), 989
(H800), 148 (H20), 312 (A800), 210 (RTX 5090, Blackwell whitepaper), 1307 (AMD Instinct
MI300X data sheet), 362 (NVIDIA L40S data sheet), 155 (RTX A6000, GA102 whitepaper), 125 (A10 data
sheet), 165 (RTX 4090, Ada whitepaper), 71 (RTX 3090, GA102 whitepaper). These eleven
have not been measured here.
"""
UNKNOWN_GPU = Gpu(3e13, 5e11, 1e10, 0)
"""A guess for a GPU that the table lacks. Its memory is asked from the driver."""
BEFORE_BF16 = ("P100", "V100", "T4", "TITAN", "GTX", "GeForce RTX 20", "Quadro RTX")
"""Parts of the names of GPUs without bf16 (older than Ampere)."""
BEFORE_FP8 = ("A100", "A800", "A40", "A30", "A10", "A6000", "RTX A", "RTX 30")
"""Parts of the names of GPUs with bf16 and without 8-bit matrix units (Ampere)."""
NETWORK = 4e10
"""Bytes/s of a GPU's network adapter, one way: 400 Gbit/s at 80 %."""

GPU_LAUNCH = 1.2e-3
"""Seconds: the host launches the forward of a layer. H200 runs without graphs."""
GPU_BETWEEN = 1.2e-4
"""Seconds from the end of a task to the next. H200 runs."""
GPU_COLLECTIVE = 4e-5
"""Seconds of a tensor-parallel collective beside its bytes. H200 runs."""
CPU_LAUNCH, CPU_BETWEEN, CPU_COLLECTIVE = 1.5e-3, 2e-4, 2e-3
"""Seconds of the same three for a process that has a CPU core to itself. Coarse: no page measures
them."""
CPU_FLOPS = 3e10
"""FLOP/s in fp32 that training reaches on a core. Coarse, likewise."""
CPU_MEMORY_RATE, CPU_LINK, CPU_NETWORK = 1e10, 2e9, 1e9
"""Bytes/s of memory, of shared memory and of the network for such a process. Coarse, likewise."""

ATTENTION_SLOWDOWN = (1.5, 2.0)
"""Forward and backward of attention's core, over the time of matrix products with as many
operations. H200 runs."""
ENGINE_ATTENTION_SLOWDOWN = (1.15, 1.6)
"""The same of Transformer Engine's, on an H100 (docs/benchmarks/slices-h100.md, "Attention by
kernel")."""
ADDED_GRADIENT_BYTES = 12
"""Bytes of memory traffic of W per weight without ``--gradient-accumulation-fusion``: its product
is written in 16 bit, and added in fp32. 8B on four H100 and 8 layers of its form on two
(docs/benchmarks/parallel-h200.md, transformer-engine.md)."""
BETWEEN_PRODUCTS = (4.2, 7.4)
"""Passes of a layer's forward and backward over the bytes that it keeps: norms, biases, activation
functions and residual additions are kernels of their own. H200 runs."""
LOSS_BYTES = {False: (62, 14), True: (36, 16)}
"""Bytes of memory traffic per logit in the loss's forward and backward, with and without
``--cross-entropy-loss-fusion``. H200 runs: 3.9 and 3.2 ms for 4096 tokens of 50,304 words at hidden
size 2048; fused, 4.4 and 3.9 ms for 8192 tokens of 51,200 words at 1024."""
TABLE_BYTES = 10
"""Bytes of memory traffic per weight of the output layer: its gradient is added. H200 runs."""
LOOKUP_BYTES = (26, 44)
"""Bytes of memory traffic of the embedding's backward, per weight of the table and per byte looked
up. H200 runs: 0.59 ms for 51,200 words at hidden size 1024, 0.87 for 50,304 at 2048."""
LINK_SHARE = 0.95
"""Share of a link's rate that a tensor-parallel collective reaches. H200 runs."""
LOSS_COLLECTIVES = 3
"""Collectives of the loss over a vocabulary that is sharded: a few bytes for each token."""

ENGINE_LAUNCH = 1.3
"""Launching a layer of Transformer Engine, in launches of a local one's. Launch-bound steps of 345M
take 1.18 (interleaved) and 1.32 (dynamic) of the local layers' time on H200s
(docs/benchmarks/scaling-h200.md), host time of F and B is 1.35 and 1.22 of theirs on an H100
(transformer-engine.md)."""
COLLECTIVE_LAUNCH = 0.2
"""Launching one tensor-parallel collective, in launches of a layer's forward. H200 runs."""
WEIGHTS_LAUNCH = 0.5
"""Launching a layer's deferred weight gradients, likewise. In a fused backward it costs nothing."""
FSDP_LAUNCH = {"gradients": 0.97, "parameters": 1.25}
"""Launching what FSDP2 adds to a layer's pass (gathers, copies, hooks), likewise. H200 runs."""
FSDP_COLLECTIVES = {"gradients": (1, 1), "parameters": (1, 2)}
"""FSDP2's collectives in a layer's forward and backward. A GPU overlaps them with its work."""
GRAPH_LAYERS = 1.07
"""Memory of an activation's graphs beside the chunk: temporaries, inputs and outputs, in
activations of a layer. Fitted to chunks of 2, 4 and 6 layers (docs/decisions/0008-graphs.md)."""
