#!/usr/bin/env bash
# Trains BERT with the dynamic pipeline: one torchrun of pretrain_bert.py on this node.
#
#   train_bert_340m_distributed.sh [CHECKPOINT_PATH TENSORBOARD_PATH VOCAB_FILE DATA_PATH]
#                                  [flags of pretrain_bert.py]
#
# Every setting can be given in the environment; examples/launch.sh has those not listed here.
# The defaults are BERT-Large: 24 layers of 1024, in fp16. Two things differ from its recipe so that
# a short run learns something: the learning rate decays over TRAIN_ITERS (with 990,000 iterations
# it would stay near 0), and the loss scale starts at 65536 (from the default 2^32, fp16 skips its
# first 15 iterations). `--bert-no-binary-head` leaves the sentence order head out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

take_positional CHECKPOINT_PATH TENSORBOARD_PATH VOCAB_FILE DATA_PATH -- "$@"
setting NUM_LAYERS 24
setting HIDDEN_SIZE 1024
setting NUM_ATTENTION_HEADS 16
setting SEQ_LENGTH 512
setting MICRO_BATCH_SIZE 4
setting GLOBAL_BATCH_SIZE 32
setting LR 1.0e-4
setting MIN_LR 1.0e-5
setting VOCAB_FILE "$REPOSITORY/datasets_bert/vocab.txt"
common_settings

check_settings
check_file VOCAB_FILE "$VOCAB_FILE"

TOKENIZER_ARGS=(
  --tokenizer-type BertWordPieceLowerCase
  --vocab-file "$VOCAB_FILE"
)

use_environment
[[ -n $DATA_PATH ]] || prepare_sample datasets_bert sentence "$VOCAB_FILE" -- \
  "${TOKENIZER_ARGS[@]}" --split-sentences --sentence-splitter rules
common_args

BERT_MODEL_ARGS=(
  --num-layers "$NUM_LAYERS"
  --hidden-size "$HIDDEN_SIZE"
  --num-attention-heads "$NUM_ATTENTION_HEADS"
  --seq-length "$SEQ_LENGTH"
  --max-position-embeddings "$SEQ_LENGTH"
  --attention-backend auto
)

TRAINING_ARGS=(
  --micro-batch-size "$MICRO_BATCH_SIZE"
  --global-batch-size "$GLOBAL_BATCH_SIZE"
  --weight-decay 1e-2
  --clip-grad 1.0
  --lr "$LR"
  --lr-decay-style linear
  --min-lr "$MIN_LR"
)

launch "$REPOSITORY/pretrain_bert.py" \
  "${BERT_MODEL_ARGS[@]}" \
  "${TRAINING_ARGS[@]}" \
  "${TOKENIZER_ARGS[@]}" \
  --split 949,50,1 \
  "${COMMON_ARGS[@]}" \
  "${FURTHER_ARGUMENTS[@]}"
