#!/usr/bin/env bash
# The launch scripts of the earlier train tool. run_megatron.sh, run_deepspeed.sh and
# run_multinode.sh are links to this file, whose name chooses the mode:
#
#   NUM_GPUS=8 TP_SIZE=2 PP_SIZE=2 bash scripts/run_3d_parallel.sh [options of train]
#
# ZERO_STAGE is for run_deepspeed.sh. NUM_NODES, NODE_RANK and MASTER_ADDR are train's own.
set -euo pipefail
tensor=${TP_SIZE:-1} pipeline=${PP_SIZE:-1}
case ${0##*/} in
  run_deepspeed.sh) words=(--mode zero --zero-stage "${ZERO_STAGE:-1}") ;;
  run_megatron.sh)
    words=(--mode megatron --tensor-model-parallel-size "$tensor")
    words+=(--pipeline-model-parallel-size "$pipeline")
    ;;
  *) words=(--mode 3d --tp "$tensor" --pp "$pipeline") ;;
esac
devices=--procs
if [[ " $* " == *" --gpu"[\ =]* || -n $(nvidia-smi -L 2>/dev/null) ]]; then
  devices=--gpus
fi
[[ -z ${NUM_GPUS:-} ]] || words+=("$devices" "$NUM_GPUS")
exec "$(dirname "${BASH_SOURCE[0]}")/../megatron-dpp" train "${words[@]}" "$@"
