#!/usr/bin/env bash
# Starts a training script whose flags are all given: what the `train` command ends with.
#
#   PYTHON=... GPUS_PER_NODE=N bash examples/launch_flags.sh pretrain_gpt.py [its flags]
#
# NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, WAIT_SECONDS, NODE_IPS and DRY_RUN are read as
# everywhere in examples/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# shellcheck disable=SC2034  # launch.sh reads it
MASTER_PORT_IS_GIVEN=${MASTER_PORT:-}
setting NUM_NODES 1
setting NODE_RANK 0
setting MASTER_ADDR localhost
setting MASTER_PORT 6000
setting WAIT_SECONDS 300
setting NODE_IPS ""
check_whole_numbers GPUS_PER_NODE NUM_NODES WAIT_SECONDS
# shellcheck disable=SC2034  # launch.sh reads it
WORLD_SIZE=$((GPUS_PER_NODE * NUM_NODES))
check_nodes
script=$1
shift
((NUM_NODES == 1)) || set -- "$@" --multi-node
[[ -z $NODE_IPS ]] || set -- "$@" --node-ips "$NODE_IPS"
launch "$REPOSITORY/$script" "$@"
