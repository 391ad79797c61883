#!/usr/bin/env bash
# Node 1 and further of a run over several nodes; arguments and settings as
# train_gpt3_175b_distributed.sh. MASTER_ADDR names node 0; the worker waits for it.
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/../launch.sh" gpt worker "$@"
