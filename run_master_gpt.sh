#!/usr/bin/env bash
# Node 0 of a run of the sample GPT over NUM_NODES hosts (2 by default). Start this on one host and
# run_worker_gpt.sh, with MASTER_ADDR naming this host, on the others. The settings must be the
# same on all. MASTER_PORT and NODE_IPS say how they reach each other.
#
# Every setting can be given in the environment (docs/environment.md; USE_DPP=0 for megatron-core's
# own schedule, DRY_RUN=1 to print the command only), and arguments are passed on to
# pretrain_gpt.py.
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/examples/launch.sh" gpt-sample master "$@"
