#!/usr/bin/env bash
# Starts a training script whose flags are all given:
#
#   PYTHON=... GPUS_PER_NODE=N bash examples/launch_flags.sh pretrain_gpt.py [its flags]
#
# The variables that name nodes, and DRY_RUN, work as in all launch scripts (docs/environment.md).
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/launch.sh" flags "$@"
