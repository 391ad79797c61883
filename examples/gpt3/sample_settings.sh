# The sizes of the sample GPT, sourced by run_single_gpt.sh, run_master_gpt.sh and
# run_worker_gpt.sh: a small model without a GPU, a larger one with GPUs.
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
  setting HIDDEN_SIZE 2048
  setting NUM_ATTENTION_HEADS 16
  setting SEQ_LENGTH 1024
  setting TRAIN_ITERS 100
  setting LR 3.0e-4
  setting MIN_LR 3.0e-5
fi
setting INIT_METHOD_STD 0.02
