"""One rank of a host that installs the plug-in, and ends by an error between two steps."""

from __future__ import annotations

from tests.runtime import equality_worker as models

import torch.distributed as dist  # isort: skip
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.dpp import DppConfig, plugin

CASE = {"p": 2, "m": 4, "layers": 2}


def main() -> None:
    models.start()
    models.initialize(CASE)
    plugin.install(DppConfig(timeout=60))
    model_parallel_cuda_manual_seed(1)
    chunks, _ = models.build(CASE)
    for number in range(2):
        if number == 1 and dist.get_rank() == 1:
            raise ValueError("a host's own trouble")
        schedules.get_forward_backward_func()(
            forward_step_func=models.ForwardStep(CASE),
            data_iterator=[models.batches(CASE)],
            model=chunks,
            num_microbatches=4,
            seq_length=models.SEQUENCE,
            micro_batch_size=models.MICRO_BATCH,
            forward_only=False,
        )


if __name__ == "__main__":
    main()
