#!/usr/bin/env bash
# Runs in the guest: two ranks train the sample GPT over RDMA, one device each. The losses and the
# hashes of the parameters go to standard output.
#
#   train.sh PYTHON FOLDER FLAG...
#
# Without torchrun, which would import PyTorch once more for each node: here that takes a minute.
set -euo pipefail
python=$1 folder=$2
shift 2
export MASTER_ADDR=10.99.0.1 MASTER_PORT=29400 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONWARNINGS=ignore
export PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1
rm -f "$folder/metrics.jsonl"
for rank in 0 1; do
  RANK=$rank GLOO_SOCKET_IFNAME=wire$rank "$python" pretrain_gpt.py "$@" \
    --dpp-transport rdma --node-ips 10.99.0.1,10.99.0.2 --metrics-file "$folder/metrics.jsonl" &
  ranks[rank]=$!
done
status=0
for rank in 0 1; do wait "${ranks[rank]}" || status=$?; done
cat "$folder/metrics.jsonl"
exit "$status"
