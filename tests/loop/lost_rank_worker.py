"""Two ranks that join a job as training does. Rank 1 is killed; rank 0 prints the culprit."""

import os
import signal
import sys


def main() -> int:
    import torch.distributed as dist

    from megatron.dpp_train import culprits
    from megatron.dpp_train.initialize import initialize
    from megatron.dpp_train.preflight import check

    words = "--device cpu --num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
    words += "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data "
    words += "--tokenizer-type NullTokenizer --vocab-size 9 --eval-iters 0 --use-dpp "
    words += "--transformer-impl local --pipeline-model-parallel-size 2 --distributed-backend gloo"
    rank = int(os.environ["RANK"])
    initialize(check.check("gpt", words.split(), 2)[0], rank)
    print(os.getpid(), flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        print(culprits.find(error), flush=True)
    os._exit(0)  # the group cannot be left any more


if __name__ == "__main__":
    sys.exit(main())
