#!/usr/bin/env bash
# Node 0 of a run over several nodes; arguments and settings as train_bert_340m_distributed.sh.
# MASTER_ADDR must be an address of this host that the other nodes reach.
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/../launch.sh" bert master "$@"
