# Shared by the launch scripts of examples/gpt3 and examples/bert, which source it: checks of the
# settings before anything is started, set-up, sample data, and the one torchrun. It edits no file.
# shellcheck shell=bash

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
  echo "error: $*" >&2
  exit 2
}

is_dry_run() {
  [[ ${DRY_RUN:-0} != 0 ]]
}

# setting NAME DEFAULT: the environment's value wins; every setting can be changed this way.
setting() {
  local -n variable=$1
  variable=${variable:-$2}
}

# What all models have in common; a model's script sets its own defaults before.
common_settings() {
  MASTER_PORT_IS_GIVEN=${MASTER_PORT:-}
  setting GPUS_PER_NODE "$(count_gpus)"
  setting NUM_NODES 1
  setting NODE_RANK 0
  setting MASTER_ADDR localhost
  setting MASTER_PORT 6000
  setting WAIT_SECONDS 300 # how long the nodes wait for each other
  setting NODE_IPS "" # addresses between nodes: one per node, or one per rank
  setting PIPELINE_PARALLEL 2
  setting TENSOR_PARALLEL 2
  setting MODEL_CHUNKS 4
  setting TRAIN_ITERS 50
  setting LR_WARMUP_FRACTION 0.05
  setting PRECISION fp16 # fp32, bf16 or fp16
  setting RECOMPUTE 1    # recompute attention in the backward pass
  setting TRANSFORMER_IMPL local
  setting USE_DPP 1    # 0: megatron-core's own static schedule
  setting WORKLOAD ""  # elements per chunk where tensors are staged through host memory
  setting TRACE 0      # 1: record what every rank does
  setting SEED 1234
  setting LOG_INTERVAL 1
  setting EVAL_INTERVAL 1000
  setting EVAL_ITERS 10
  setting SAVE_INTERVAL 10000
  setting CHECKPOINT_PATH "" # save to and load from here
  setting TENSORBOARD_PATH ""
  setting DATA_PATH "" # empty: the sample corpus
  ((GPUS_PER_NODE > 0)) ||
    die "no GPU was found; run_single_gpt.sh and run_single_bert.sh run without one, and here" \
      "GPUS_PER_NODE=4 starts four processes on the CPU"
}

# Defaults of the run_*.sh scripts, exported: everything at hand in one pipeline. Without a GPU that
# is four processes on one node, two on each of several.
sample_settings() {
  set -a
  setting NUM_NODES 1
  NUM_GPUS=$(count_gpus)
  if ((NUM_GPUS == 0)); then
    setting GPUS_PER_NODE "$((NUM_NODES > 1 ? 2 : 4))"
    setting TENSOR_PARALLEL 2
    setting PRECISION fp32
  else
    setting GPUS_PER_NODE "$NUM_GPUS"
    setting TENSOR_PARALLEL 1
    setting PRECISION bf16
  fi
  check_whole_numbers NUM_NODES GPUS_PER_NODE TENSOR_PARALLEL
  local pipeline=$((GPUS_PER_NODE * NUM_NODES / TENSOR_PARALLEL))
  setting PIPELINE_PARALLEL "$((pipeline > 0 ? pipeline : 1))"
  setting MODEL_CHUNKS "$((PIPELINE_PARALLEL > 1 ? 2 : 1))"
  check_whole_numbers PIPELINE_PARALLEL MODEL_CHUNKS
  local stages=$((PIPELINE_PARALLEL * MODEL_CHUNKS))
  setting NUM_LAYERS "$((stages < 4 ? 8 / stages * stages : stages * 2))"
  setting MICRO_BATCH_SIZE 4
  setting GLOBAL_BATCH_SIZE "$((MICRO_BATCH_SIZE * PIPELINE_PARALLEL * 4))"
  setting RECOMPUTE 0
  setting EVAL_ITERS 2
  setting TRACE 1
}

# Sets COMMON_ARGS: the flags that do not depend on the model.
common_args() {
  COMMON_ARGS=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL"
    --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
    --transformer-impl "$TRANSFORMER_IMPL"
    --train-iters "$TRAIN_ITERS"
    --lr-decay-iters "$TRAIN_ITERS"
    --lr-warmup-fraction "$LR_WARMUP_FRACTION"
    --seed "$SEED"
    --data-path "${DATA_PREFIXES[@]}"
    --log-interval "$LOG_INTERVAL"
    --save-interval "$SAVE_INTERVAL"
    --eval-interval "$EVAL_INTERVAL"
    --eval-iters "$EVAL_ITERS"
  )
  ((MODEL_CHUNKS == 1)) || COMMON_ARGS+=(
    --num-layers-per-virtual-pipeline-stage $((NUM_LAYERS / PIPELINE_PARALLEL / MODEL_CHUNKS))
  )
  case $PRECISION in
    fp16) COMMON_ARGS+=(--fp16 --initial-loss-scale 65536) ;;
    bf16) COMMON_ARGS+=(--bf16) ;;
  esac
  [[ $RECOMPUTE == 0 ]] || COMMON_ARGS+=(--recompute-activations)
  [[ $USE_DPP == 0 ]] || COMMON_ARGS+=(--use-dpp)
  [[ -z $WORKLOAD ]] || COMMON_ARGS+=(--workload "$WORKLOAD")
  [[ $TRACE == 0 ]] || COMMON_ARGS+=(--trace)
  [[ -z $CHECKPOINT_PATH ]] || COMMON_ARGS+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH")
  [[ -z $TENSORBOARD_PATH ]] || COMMON_ARGS+=(--tensorboard-dir "$TENSORBOARD_PATH")
  ((NUM_NODES == 1)) || COMMON_ARGS+=(--multi-node)
  [[ -z $NODE_IPS ]] || COMMON_ARGS+=(--node-ips "$NODE_IPS")
}

# How many GPUs this machine offers, without the seconds that importing PyTorch takes.
count_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^ *[^ -]' || true # -1 hides them all
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}

# take_positional NAME... -- ARGUMENT...: Megatron-LM's examples take paths as positional arguments;
# they become settings. What follows is left in FURTHER_ARGUMENTS.
take_positional() {
  local names=()
  while [[ $1 != -- ]]; do
    names+=("$1")
    shift
  done
  shift
  while (($#)) && [[ $1 != -* ]]; do
    ((${#names[@]})) || die "unexpected argument '$1': flags of the training script start with --"
    printf -v "${names[0]}" '%s' "$1"
    names=("${names[@]:1}")
    shift
  done
  # shellcheck disable=SC2034  # read by the script that sourced this one
  FURTHER_ARGUMENTS=("$@")
  ((!$#)) || preflight flags "$@"
}

check_whole_numbers() {
  local name
  for name in "$@"; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name}: must be a whole number, at least 1"
  done
}

check_switches() {
  local name
  for name in "$@"; do
    [[ ${!name} =~ ^[01]$ ]] || die "$name=${!name}: must be 0 or 1"
  done
}

# Everything that can be wrong with the settings, found in milliseconds and before anything starts.
check_settings() {
  check_layout
  check_nodes
  check_data
  check_switches USE_DPP TRACE RECOMPUTE
  [[ $PRECISION =~ ^(fp32|bf16|fp16)$ ]] || die "PRECISION=$PRECISION: must be fp32, bf16 or fp16"
}

check_layout() {
  check_whole_numbers PIPELINE_PARALLEL MODEL_CHUNKS TENSOR_PARALLEL GPUS_PER_NODE NUM_NODES \
    NUM_LAYERS HIDDEN_SIZE NUM_ATTENTION_HEADS SEQ_LENGTH MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE \
    TRAIN_ITERS WAIT_SECONDS
  WORLD_SIZE=$((GPUS_PER_NODE * NUM_NODES))
  local model_parallel=$((PIPELINE_PARALLEL * TENSOR_PARALLEL))
  local stages=$((PIPELINE_PARALLEL * MODEL_CHUNKS))
  local processes="$WORLD_SIZE processes (GPUS_PER_NODE=$GPUS_PER_NODE x NUM_NODES=$NUM_NODES)"
  ((WORLD_SIZE % model_parallel == 0)) ||
    die "PIPELINE_PARALLEL=$PIPELINE_PARALLEL x TENSOR_PARALLEL=$TENSOR_PARALLEL = $model_parallel" \
      "does not divide $processes"
  ((stages <= NUM_LAYERS)) ||
    die "PIPELINE_PARALLEL=$PIPELINE_PARALLEL x MODEL_CHUNKS=$MODEL_CHUNKS = $stages virtual stages" \
      "are more than NUM_LAYERS=$NUM_LAYERS: each needs a layer"
  ((NUM_LAYERS % stages == 0)) ||
    die "NUM_LAYERS=$NUM_LAYERS cannot be divided by PIPELINE_PARALLEL=$PIPELINE_PARALLEL x" \
      "MODEL_CHUNKS=$MODEL_CHUNKS = $stages virtual stages"
  ((PIPELINE_PARALLEL > 1 || MODEL_CHUNKS == 1)) ||
    die "MODEL_CHUNKS=$MODEL_CHUNKS needs PIPELINE_PARALLEL of at least 2, it is 1"
  check_widths
  check_batch "$((WORLD_SIZE / model_parallel))"
}

check_widths() {
  ((HIDDEN_SIZE % NUM_ATTENTION_HEADS == 0)) ||
    die "HIDDEN_SIZE=$HIDDEN_SIZE cannot be divided by NUM_ATTENTION_HEADS=$NUM_ATTENTION_HEADS"
  ((NUM_ATTENTION_HEADS % TENSOR_PARALLEL == 0)) ||
    die "NUM_ATTENTION_HEADS=$NUM_ATTENTION_HEADS cannot be divided by" \
      "TENSOR_PARALLEL=$TENSOR_PARALLEL"
}

check_batch() {
  local replicas=$1
  local samples=$((MICRO_BATCH_SIZE * replicas))
  ((GLOBAL_BATCH_SIZE % samples == 0)) ||
    die "GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE cannot be divided by" \
      "MICRO_BATCH_SIZE=$MICRO_BATCH_SIZE x $replicas data-parallel replicas = $samples"
  local microbatches=$((GLOBAL_BATCH_SIZE / samples))
  ((MODEL_CHUNKS == 1 || microbatches % PIPELINE_PARALLEL == 0)) ||
    die "$microbatches microbatches (GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE / $samples) cannot be" \
      "divided by PIPELINE_PARALLEL=$PIPELINE_PARALLEL, as MODEL_CHUNKS=$MODEL_CHUNKS needs"
}

# check_file KNOB PATH
check_file() {
  [[ -f $2 && -r $2 ]] || die "$1=$2: no such file, or it cannot be read"
}

# DATA_PATH is one prefix, or weights and prefixes as --data-path takes them.
check_data() {
  local word suffix
  read -ra DATA_PREFIXES <<<"$DATA_PATH"
  for word in "${DATA_PREFIXES[@]}"; do
    [[ $word =~ ^[0-9.]+$ ]] && continue
    for suffix in .bin .idx; do
      [[ -f $word$suffix ]] ||
        die "DATA_PATH=$DATA_PATH: $word$suffix is missing; tools/preprocess_data.py makes it from" \
          "JSON lines (DATA_PATH is its --output-prefix with _text_document or _text_sentence added)"
    done
  done
}

# NODE_IPS: addresses between nodes, one per node or one per rank in rank order.
check_nodes() {
  [[ $NODE_RANK =~ ^[0-9]+$ ]] || die "NODE_RANK=$NODE_RANK: must be a whole number, at least 0"
  ((NODE_RANK < NUM_NODES)) ||
    die "NODE_RANK=$NODE_RANK: with NUM_NODES=$NUM_NODES it must be less than $NUM_NODES"
  [[ $MASTER_PORT =~ ^[1-9][0-9]{0,4}$ && $MASTER_PORT -le 65535 ]] ||
    die "MASTER_PORT=$MASTER_PORT: must be a port number, 1 to 65535"
  [[ -n $MASTER_ADDR ]] || die "MASTER_ADDR is not set: name the host of NODE_RANK=0"
  [[ -z $NODE_IPS ]] && return
  local addresses address
  IFS=, read -ra addresses <<<"$NODE_IPS"
  ((${#addresses[@]} == NUM_NODES || ${#addresses[@]} == WORLD_SIZE)) ||
    die "NODE_IPS=$NODE_IPS has ${#addresses[@]} addresses: expected one per node ($NUM_NODES) or" \
      "one per rank ($WORLD_SIZE)"
  for address in "${addresses[@]}"; do
    [[ $address =~ ^[0-9]+(\.[0-9]+){3}$ || $address =~ ^[0-9a-fA-F:]+:[0-9a-fA-F:.%a-z]*$ ]] ||
      die "NODE_IPS=$NODE_IPS: '$address' is not an IP address"
  done
}

# wait_for_master: returns once MASTER_ADDR:MASTER_PORT accepts connections; gives up after
# WAIT_SECONDS.
wait_for_master() {
  local end=$((SECONDS + WAIT_SECONDS)) said=-1 left
  # shellcheck disable=SC2016  # the inner shell expands them
  until timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$MASTER_ADDR" "$MASTER_PORT" 2>/dev/null; do
    left=$((end - SECONDS))
    ((left > 0)) ||
      die "no master at $MASTER_ADDR:$MASTER_PORT within WAIT_SECONDS=$WAIT_SECONDS: start" \
        "run_master_*.sh there (or train with NODE_RANK=0), check MASTER_ADDR and MASTER_PORT and" \
        "the firewall in between"
    if ((said < 0 || said - left >= 5)); then
      echo "waiting for the master at $MASTER_ADDR:$MASTER_PORT, $left s left"
      said=$left
    fi
    sleep 1
  done
}

# use_interface: lets gloo, and NCCL where NODE_IPS names a network, talk over the interface of this
# node's own address. Without it gloo takes what the host's name resolves to, often a loopback.
use_interface() {
  local addresses=() own=() found address interface
  IFS=, read -ra addresses <<<"$NODE_IPS"
  if ((${#addresses[@]} == NUM_NODES)); then
    own=("${addresses[NODE_RANK]}")
  else
    own=("${addresses[@]:NODE_RANK*GPUS_PER_NODE:GPUS_PER_NODE}")
  fi
  found=$(PYTHONPATH=$REPOSITORY "$PYTHON" -m megatron.dpp.hosts "$MASTER_ADDR" "${own[@]}") || exit
  read -r address interface <<<"$found"
  echo "this node (NODE_RANK=$NODE_RANK) talks to the others from $address, interface" \
    "${interface:-unknown}"
  [[ $address != 127.* ]] ||
    echo "warning: MASTER_ADDR=$MASTER_ADDR is a loopback address here: other hosts cannot reach it" >&2
  [[ -n $interface ]] || return 0
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
  [[ -z $NODE_IPS ]] || export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface}
}

# meet_nodes: addresses that are given are checked before anything waits; without them the route to
# the master decides, whose name may resolve only once it is there.
meet_nodes() {
  [[ -z $NODE_IPS ]] || use_interface
  if ((NODE_RANK > 0)); then
    wait_for_master
  else
    echo "master at $MASTER_ADDR:$MASTER_PORT: waiting $WAIT_SECONDS s for $((NUM_NODES - 1)) other" \
      "nodes (run_worker_*.sh with MASTER_ADDR=$MASTER_ADDR)"
  fi
  [[ -n $NODE_IPS ]] || use_interface
}

# use_environment: the Python to run with, set up when something is missing.
use_environment() {
  is_dry_run && PYTHON=${PYTHON:-python3} && return
  PYTHON=$(bash "$REPOSITORY/tools/setup.sh") || exit
}

# prepare_sample FOLDER LEVEL FILE... -- ARGUMENT...: makes the token files of a sample corpus unless
# they are there, and sets DATA_PREFIXES. Their name holds a hash of what they are made from (FILEs
# are vocabularies), so that a new one never meets old tokens. ARGUMENTs are preprocess_data.py's.
prepare_sample() {
  local folder=$1 level=$2 files=("$REPOSITORY/$1/dataset.json")
  shift 2
  while [[ $1 != -- ]]; do
    files+=("$1")
    shift
  done
  shift
  local prefix
  prefix=$REPOSITORY/$folder/sample-$(cat "${files[@]}" | sha256sum | cut -c -12)
  local tokens=${prefix}_text_$level
  DATA_PREFIXES=("$tokens")
  [[ -f $tokens.idx && -f $tokens.bin ]] && return
  local command=("$PYTHON" "$REPOSITORY/tools/preprocess_data.py" --input "${files[0]}"
    --output-prefix "$prefix" "$@")
  if is_dry_run; then
    print_command "${command[@]}"
  else
    "${command[@]}" || die "the sample corpus could not be preprocessed"
  fi
}

# preflight gpt|bert|flags FLAG...: refuses, without importing PyTorch, what cannot work; "flags"
# looks only whether the training script knows them, and needs nothing but Python.
preflight() {
  is_dry_run && return
  PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH} WORLD_SIZE=${WORLD_SIZE:-1} \
    LOCAL_WORLD_SIZE=${GPUS_PER_NODE:-1} \
    "${PYTHON:-python3}" -m megatron.dpp.cli.preflight "$@" || exit
}

print_command() {
  printf '%q ' "$@"
  echo
}

# launch SCRIPT ARGUMENT...: replaces this shell by torchrun. DRY_RUN=1 prints the command instead.
launch() {
  local distributed=(--nproc_per_node "$GPUS_PER_NODE" --nnodes "$NUM_NODES")
  if ((NUM_NODES > 1)) || [[ -n $MASTER_PORT_IS_GIVEN ]]; then
    distributed+=(--node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
      --rdzv_conf "timeout=$WAIT_SECONDS")
  else
    distributed+=(--standalone) # a free port: two runs on one machine do not meet
  fi
  # megatron-core's tensor parallelism relies on one hardware queue. Without it there are several:
  # what a rank sends must not queue behind what it waits for, nor a reduction behind a replayed
  # backward.
  local queues=1
  if [[ ${TENSOR_PARALLEL:-unknown} == 1 ]]; then queues=8; fi
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-$queues}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export TOKENIZERS_PARALLELISM=false
  # What megatron-core says in every process about packages that nothing here needs.
  local quiet="ignore:Transformer Engine and Apex are not installed:UserWarning"
  quiet+=",ignore:Apex is not installed:UserWarning,ignore:full scope is deprecated:UserWarning"
  export PYTHONWARNINGS=${PYTHONWARNINGS:-$quiet}
  export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
  local command=("$PYTHON" -m megatron.dpp.train.torchrun "${distributed[@]}" "$@")
  if is_dry_run; then
    print_command "${command[@]}"
    exit 0
  fi
  local model=${1##*pretrain_}
  preflight "${model%.py}" "${@:2}"
  ((NUM_NODES == 1)) || meet_nodes
  exec "${command[@]}"
}
