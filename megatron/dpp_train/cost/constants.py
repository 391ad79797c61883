"""Constants of the cost model: value, unit, and the measurement behind each; those of devices are
in ``device.py``. "H200 runs" are those of docs/benchmarks/scaling-h200.md and schedule-h200.md.
"""

from __future__ import annotations

ATTENTION_SLOWDOWN = {False: (1.5, 2.0), True: (1.15, 1.6)}
"""Forward and backward of attention's core, over the time of matrix products with as many
operations: of local layers in H200 runs, and of Transformer Engine's on an H100
(docs/benchmarks/slices-h100.md, "Attention by kernel")."""
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
GRAPH_LAYERS = 1.07
"""Memory of an activation's graphs beside the chunk: temporaries, inputs and outputs, in
activations of a layer. Fitted to chunks of 2, 4 and 6 layers (docs/decisions/0008-graphs.md)."""
