#!/usr/bin/env bash
# Node 0 of a run over several nodes; arguments and settings as train_gpt3_175b_distributed.sh.
# MASTER_ADDR must be an address of this host that the other nodes reach.
set -euo pipefail
export NUM_NODES=${NUM_NODES:-2} NODE_RANK=${NODE_RANK:-0}
export MASTER_ADDR=${MASTER_ADDR:-$(hostname -I 2>/dev/null | cut -d ' ' -f 1)}
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_gpt3_175b_distributed.sh" "$@"
