#!/usr/bin/env bash
# Trains GPT with the dynamic pipeline: one torchrun of pretrain_gpt.py on this node.
#
#   train_gpt3_175b_distributed.sh [CHECKPOINT_PATH TENSORBOARD_PATH VOCAB_FILE MERGE_FILE DATA_PATH]
#                                  [flags of pretrain_gpt.py]
#
# Every setting can be given in the environment; examples/launch.sh has those not listed here.
# The defaults are GPT-3's recipe cut to 16 layers of 2048, in fp16. Two things differ from it so
# that a short run learns something: the learning rate decays over TRAIN_ITERS (with GPT-3's 430,000
# iterations it would stay near 0), and the loss scale starts at 65536 (from the default 2^32, fp16
# skips its first 15 iterations).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

take_positional CHECKPOINT_PATH TENSORBOARD_PATH VOCAB_FILE MERGE_FILE DATA_PATH -- "$@"
setting NUM_LAYERS 16
setting HIDDEN_SIZE 2048
setting NUM_ATTENTION_HEADS 32
setting SEQ_LENGTH 1024
setting MICRO_BATCH_SIZE 1
setting GLOBAL_BATCH_SIZE 16
setting LR 6.0e-5
setting MIN_LR 6.0e-6
setting INIT_METHOD_STD 0.006
setting VOCAB_FILE "$REPOSITORY/datasets_gpt/vocab.json"
setting MERGE_FILE "$REPOSITORY/datasets_gpt/merges.txt"
common_settings

check_settings
check_file VOCAB_FILE "$VOCAB_FILE"
check_file MERGE_FILE "$MERGE_FILE"

TOKENIZER_ARGS=(
  --tokenizer-type GPT2BPETokenizer
  --vocab-file "$VOCAB_FILE"
  --merge-file "$MERGE_FILE"
)

use_environment
[[ -n $DATA_PATH ]] || prepare_sample datasets_gpt document "$VOCAB_FILE" "$MERGE_FILE" -- \
  "${TOKENIZER_ARGS[@]}" --append-eod
common_args

GPT_MODEL_ARGS=(
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
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --init-method-std "$INIT_METHOD_STD"
  --clip-grad 1.0
  --lr "$LR"
  --lr-decay-style cosine
  --min-lr "$MIN_LR"
)

launch "$REPOSITORY/pretrain_gpt.py" \
  "${GPT_MODEL_ARGS[@]}" \
  "${TRAINING_ARGS[@]}" \
  "${TOKENIZER_ARGS[@]}" \
  --split 949,50,1 \
  "${COMMON_ARGS[@]}" \
  "${FURTHER_ARGUMENTS[@]}"
