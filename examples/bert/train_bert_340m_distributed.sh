#!/usr/bin/env bash
# Trains BERT with the dynamic pipeline: one torchrun of pretrain_bert.py on this node.
#
#   train_bert_340m_distributed.sh [CHECKPOINT_PATH TENSORBOARD_PATH VOCAB_FILE DATA_PATH]
#                                  [flags of pretrain_bert.py]
#
# Every setting can be given in the environment (docs/environment.md).
# The defaults are BERT-Large: 24 layers of 1024, in fp16. Two defaults differ from its recipe so
# that a short run learns something: the learning rate decays over TRAIN_ITERS (with 990,000
# iterations it would stay near 0), and the loss scale starts at 65536 (from the default 2^32, fp16
# skips its first 15 iterations). `--bert-no-binary-head` leaves the sentence order head out.
DPP_PROGRAM=$0 exec bash "$(dirname "$0")/../launch.sh" bert node "$@"
