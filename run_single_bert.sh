#!/usr/bin/env bash
# Trains the sample BERT on this machine with a dynamic pipeline: `bash run_single_bert.sh`.
#
# Without a GPU it starts four processes on the CPU with a small model; with GPUs one process for
# each and a larger model in bf16. Settings: every setting can be given in the
# environment (USE_DPP=0 for megatron-core's own schedule, DRY_RUN=1 to print the command only;
# examples/launch.sh and examples/bert/train_bert_340m_distributed.sh list them), and arguments are
# passed on to pretrain_bert.py.
set -euo pipefail
examples=$(dirname "${BASH_SOURCE[0]}")/examples/bert
source "$examples/sample_settings.sh"
exec bash "$examples/train_bert_340m_distributed.sh" "$@"
