#!/usr/bin/env bash
# Trains the sample GPT on this machine with a dynamic pipeline: `bash run_single_gpt.sh`.
#
# Without a GPU it starts four processes on the CPU with a small model; with GPUs one process for
# each and a larger model in bf16.
#
# Every setting can be given in the environment (docs/environment.md; USE_DPP=0 for megatron-core's
# own schedule, DRY_RUN=1 to print the command only), and arguments are passed on to
# pretrain_gpt.py.
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/examples/launch.sh" gpt-sample node "$@"
