#!/usr/bin/env bash
# Node 1 and further of a run over several nodes; arguments and settings as
# train_bert_340m_distributed.sh. MASTER_ADDR names node 0; the worker waits for it.
set -euo pipefail
if [[ -z ${MASTER_ADDR:-} ]]; then
  echo "error: MASTER_ADDR is not set: name the host of the master (NODE_RANK=0)" >&2
  exit 2
fi
export NUM_NODES=${NUM_NODES:-2} NODE_RANK=${NODE_RANK:-1}
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_bert_340m_distributed.sh" "$@"
