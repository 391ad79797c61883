#!/usr/bin/env bash
# Node NODE_RANK (1 by default) of a run of the sample GPT over NUM_NODES hosts. MASTER_ADDR names the
# host of run_master_gpt.sh, which this waits for (WAIT_SECONDS); the settings must be the same on
# all. MASTER_PORT and NODE_IPS say how they reach each other; every setting can be given in the
# environment (USE_DPP=0 for megatron-core's own schedule, DRY_RUN=1 to print the command only;
# examples/launch.sh and examples/gpt3/train_gpt3_175b_distributed.sh list them), and arguments are
# passed on to pretrain_gpt.py.
set -euo pipefail
export NUM_NODES=${NUM_NODES:-2}
examples=$(dirname "${BASH_SOURCE[0]}")/examples/gpt3
source "$examples/sample_settings.sh"
exec bash "$examples/train_gpt3_175b_distributed_worker.sh" "$@"
