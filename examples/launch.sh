#!/usr/bin/env bash
# Starts a run from settings in the environment; what all launch scripts end with.
#
#   bash examples/launch.sh RECIPE ROLE [PATHS] [flags of Megatron-LM]
#
# RECIPE is gpt or bert, or with -sample the sizes of run_*.sh; ROLE is node, master or worker.
# docs/environment.md lists the settings; DRY_RUN=1 prints the command only.
export DPP_PROGRAM=${DPP_PROGRAM:-$0} # what errors begin with: the script that was called
exec bash "$(dirname "${BASH_SOURCE[0]}")/../megatron-dpp" train --preset "$@"
