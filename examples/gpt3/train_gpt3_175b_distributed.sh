#!/usr/bin/env bash
# Trains GPT with the dynamic pipeline: one torchrun of pretrain_gpt.py on this node.
#
#   train_gpt3_175b_distributed.sh [CHECKPOINT_PATH TENSORBOARD_PATH VOCAB_FILE MERGE_FILE DATA_PATH]
#                                  [flags of pretrain_gpt.py]
#
# Every setting can be given in the environment (docs/environment.md).
# The defaults are GPT-3's recipe cut to 16 layers of 2048, in fp16. Two defaults differ from it so
# that a short run learns something: the learning rate decays over TRAIN_ITERS (with GPT-3's 430,000
# iterations it would stay near 0), and the loss scale starts at 65536 (from the default 2^32, fp16
# skips its first 15 iterations).
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/../launch.sh" gpt node "$@"
