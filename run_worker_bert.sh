#!/usr/bin/env bash
# Node NODE_RANK (1 by default) of a run of the sample BERT over NUM_NODES hosts. MASTER_ADDR names the
# host of run_master_bert.sh, which this waits for (WAIT_SECONDS); the settings must be the same on
# all. MASTER_PORT and NODE_IPS say how they reach each other; every setting can be given in the
# environment (USE_DPP=0 for megatron-core's own schedule, DRY_RUN=1 to print the command only;
# examples/launch.sh and examples/bert/train_bert_340m_distributed.sh list them), and arguments are
# passed on to pretrain_bert.py.
set -euo pipefail
export NUM_NODES=${NUM_NODES:-2}
examples=$(dirname "${BASH_SOURCE[0]}")/examples/bert
source "$examples/sample_settings.sh"
exec bash "$examples/train_bert_340m_distributed_worker.sh" "$@"
