# The sizes of the sample BERT, sourced by run_single_bert.sh, run_master_bert.sh and
# run_worker_bert.sh: a small model without a GPU, a larger one with GPUs.
# shellcheck shell=bash
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
sample_settings
if ((NUM_GPUS == 0)); then
  setting HIDDEN_SIZE 128
  setting NUM_ATTENTION_HEADS 4
  setting SEQ_LENGTH 128
  setting TRAIN_ITERS 50
  setting LR 2.0e-3
  setting MIN_LR 2.0e-4
else
  setting HIDDEN_SIZE 1024
  setting NUM_ATTENTION_HEADS 16
  setting SEQ_LENGTH 512
  setting TRAIN_ITERS 100
  setting LR 2.0e-4
  setting MIN_LR 2.0e-5
fi
