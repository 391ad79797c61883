#!/usr/bin/env bash
# Trains the sample GPT on this machine with a dynamic pipeline: `bash run_single_gpt.sh`.
#
# Without a GPU it starts four processes on the CPU with a small model; with GPUs one process for
# each and a larger model in bf16. Settings: every setting can be given in the
# environment (USE_DPP=0 for megatron-core's own schedule, DRY_RUN=1 to print the command only;
# examples/launch.sh and examples/gpt3/train_gpt3_175b_distributed.sh list them), and arguments are
# passed on to pretrain_gpt.py.
set -euo pipefail
examples=$(dirname "${BASH_SOURCE[0]}")/examples/gpt3
source "$examples/sample_settings.sh"
exec bash "$examples/train_gpt3_175b_distributed.sh" "$@"
