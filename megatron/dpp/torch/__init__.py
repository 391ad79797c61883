"""The dynamic pipeline in the place of a schedule of ``torch.distributed.pipelining``.

    from megatron.dpp.torch import DynamicSchedule

    schedule = DynamicSchedule(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(input_ids, target=labels, losses=losses)

It needs no megatron-core.
"""

from megatron.dpp.torch.schedule import DynamicSchedule

__all__ = ["DynamicSchedule"]
