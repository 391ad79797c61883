#!/usr/bin/env bash
# Node NODE_RANK (1 by default) of a run of the sample GPT over NUM_NODES hosts. MASTER_ADDR names
# the host of run_master_gpt.sh, which this waits for (WAIT_SECONDS). The settings must be the same
# on all. MASTER_PORT and NODE_IPS say how they reach each other.
#
# Every setting can be given in the environment (docs/environment.md; USE_DPP=0 for megatron-core's
# own schedule, DRY_RUN=1 to print the command only), and arguments are passed on to
# pretrain_gpt.py.
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/examples/launch.sh" gpt-sample worker "$@"
