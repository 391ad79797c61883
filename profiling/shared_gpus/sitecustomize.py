"""Several ranks per GPU: rehearse a larger job on fewer GPUs. Python runs this file at its start.

    nvidia-cuda-mps-control -d
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25  # each rank gets a quarter of its GPU's processors
    NUM_GPUS=1 PYTHONPATH=profiling/shared_gpus \
        python profiling/bench_plugin.py --sources DIR --ranks 4 --arms static-links,dynamic

Local rank r runs on GPU r % NUM_GPUS, at the same time as the others there (NVIDIA's Multi-Process
Service; without it they take turns). NCCL refuses two ranks on one GPU of one host, so every
NUM_GPUS ranks seem to be a host of their own to it, and it connects such hosts by sockets: correct,
but slow, so a pipeline should use our transport throughout.
"""

import os

if "NUM_GPUS" in os.environ and "LOCAL_RANK" in os.environ:
    _num_gpus, _rank = int(os.environ.pop("NUM_GPUS")), int(os.environ["LOCAL_RANK"])
    os.environ["LOCAL_RANK"] = str(_rank % _num_gpus)
    os.environ["NCCL_HOSTID"] = f"{os.uname().nodename}.{_rank // _num_gpus}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
