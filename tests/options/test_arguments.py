"""Flags: names, derived values, and refusals that name the flag."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

import pytest
import torch

from megatron.dpp.config import option_fields
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.model.configs import check_with_core, settled
from megatron.dpp_train.options.arguments import parse_args, warnings_of
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.validate import validate
from megatron.dpp_train.options.validate_experts import replicas_in_step

MINIMUM = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --eval-interval 5 "
    "--transformer-impl local --device cpu --mock-data"
)

YARN = "--position-embedding-type yarn --yarn-original-max-position-embeddings 8"
EXPERTS = "--num-experts 4 --disable-bias-linear"


def checked(more: str = "", world_size: int = 1, without: str = "") -> RunConfig:
    words = MINIMUM.split()
    if without:
        at = words.index(without)
        del words[at : at + 2]
    return settled(validate(parse_args([*words, *more.split()]), world_size))


def test_defaults_and_derived_values_are_megatrons() -> None:
    args = checked("--bf16 --recompute-activations --tensor-model-parallel-size 2", world_size=4)
    assert (args.ffn_hidden_size, args.kv_channels) == (256, 16)
    assert (args.data_parallel_size, args.global_batch_size) == (2, 4)
    assert args.params_dtype is torch.bfloat16
    assert args.accumulate_allreduce_grads_in_fp32
    assert args.recompute_granularity == "selective"
    assert (args.adam_beta2, args.clip_grad, args.seed, args.initial_loss_scale) == (
        0.999, 1.0, 1234, 2**32,
    )  # fmt: skip


@pytest.mark.parametrize("ramp", ["4 4 20", "2 8 20", "4 4 0", "3 3 20", "2 1 20"])
def test_a_ramp_that_does_not_arrive_is_refused(ramp: str) -> None:
    samples = "--train-samples 40 --global-batch-size 6"
    checked(f"{samples} --rampup-batch-size 2 4 20", without="--train-iters")
    with pytest.raises(ConfigError, match=f"--rampup-batch-size {ramp}: "):
        checked(f"{samples} --rampup-batch-size {ramp}", without="--train-iters")


def test_megatron_core_has_its_say_before_there_are_processes() -> None:
    refused = "--recompute-granularity selective --recompute-modules bogus"
    with pytest.raises(ConfigError, match="megatron-core refuses these settings: Invalid choices"):
        check_with_core(checked(refused))
    check_with_core(checked("--swiglu --bf16"))


def test_virtual_stages_follow_from_layers_per_stage() -> None:
    pipeline = "--pipeline-model-parallel-size 2 --global-batch-size 8 "
    args = checked(pipeline + "--num-layers-per-virtual-pipeline-stage 2", world_size=2)
    assert args.virtual_pipeline_model_parallel_size == 2
    assert args.overlap_p2p_comm
    args = checked(pipeline + "--num-layers-per-virtual-pipeline-stage 4", world_size=2)
    assert args.virtual_pipeline_model_parallel_size is None
    assert not args.overlap_p2p_comm


@pytest.mark.parametrize(
    ("more", "world_size", "said"),
    [
        ("--pipeline-model-paralel-size 2", 1, "did you mean --pipeline-model-parallel-size"),
        ("--tensor-model-parallel-size 2", 3, "3 processes cannot hold"),
        ("--pipeline-model-parallel-size 3", 3, "--num-layers 8 is not divisible"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2,
         "4 layers per pipeline rank"),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "need --pipeline-model-parallel-size"),
        ("--global-batch-size 3", 1, "--global-batch-size 3 is not a multiple"),
        ("--fp16 --bf16", 1, "--fp16 and --bf16"),
        ("--min-lr 1", 1, "--min-lr 1.0 is above --lr"),
        ("--save here", 1, "--save-interval"),
        ("--save-interval 4 --save-retain-interval 6", 1, "6 is not a multiple of --save-interv"),
        ("--data-path here", 1, "--mock-data and --data-path"),
        ("--overlap-param-gather", 1, "--use-distributed-optimizer"),
        ("--attention-backend fast", 1, "invalid choice: 'fast'"),
        ("--train-samples 5", 1, "--train-iters and --train-samples"),
        ("--seq-length 64", 1, "--max-position-embeddings 32 is below"),
        ("--batch-size 4", 1, "use --micro-batch-size"),
        ("--context-parallel-size 2 --reset-attention-mask", 2, "cut causal attention alone"),
        ("--hybrid-context-parallel", 2, "--hybrid-context-parallel is not supported here"),
        (f"{EXPERTS} --overlap-moe-expert-parallel-comm", 1, "layers of two microbatches"),
        ("--seq-length 12 --context-parallel-size 2 --tensor-model-parallel-size 4 "
         "--sequence-parallel", 8,
         "12 is not divisible by --tensor-model-parallel-size 4 x --context-parallel-size 2 "
         r"\(--sequence-parallel\)"),
        ("--num-experts 4 --expert-model-parallel-size 2 --moe-grouped-gemm", 2,
         "grouped products add no bias"),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", 1, "flex needs DeepEP"),
        (f"{EXPERTS} --moe-router-topk 5", 1, "between 1 and --num-experts 4"),
        (f"{EXPERTS} --moe-router-topk 1", 1, "needs --moe-router-pre-softmax"),
        (f"{EXPERTS} --moe-layer-freq [1]*3", 1, "a 0 or 1 for each of --num-layers 8"),
        (f"{EXPERTS} --moe-aux-loss-coeff 1 2", 1, "names 1 losses and .* 2 weights"),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1", 1,
         "sinkhorn has no auxiliary loss"),
        (f"{EXPERTS} --tensor-model-parallel-size 2", 2, "needs --sequence-parallel"),
        (f"{EXPERTS} --expert-model-parallel-size 3", 3, "4 is not divisible by --expert-model"),
        (f"{EXPERTS} --expert-model-parallel-size 0", 1, "model-parallel-size 0: must be at least"),
        (f"{EXPERTS} --expert-tensor-parallel-size 0", 1, "parallel-size 0: must be at least 1"),
        (f"{EXPERTS} --expert-model-parallel-size 2", 1, "1 processes cannot hold"),
        (f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel "
         "--expert-tensor-parallel-size 1", 2,
         "below --tensor-model-parallel-size 2 needs --expert-model-parallel-size"),
        ("--expert-model-parallel-size 2", 2, "--expert-model-parallel-size 2 needs --num-experts"),
        ("--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size 2 "
         "--save here --save-interval 1", 2, "add --untie-embeddings-and-output-weights"),
        ("--mtp-num-layers 1", 1, "--position-embedding-type learned_absolute; use rope"),
        ("--multi-latent-attention", 1, "--multi-latent-attention needs modules of"),
        ("--spec my.module layer", 1, "only local is possible here"),
        ("--rl-default-top-k 4", 1, "not built here: reinforcement learning"),
        ("--multiple-validation-sets", 1, "not built here: several validation sets"),
        ("--masking-max-ngram 0", 1, "--masking-max-ngram 0: must be above 0"),
        ("--mask-prob 1", 1, "--mask-prob 1.0: must be above 0 and below 1"),
        ("--masking-do-permutation --masking-use-geometric-distribution", 1,
         "and --masking-do-permutation exclude each other"),
        ("--window-size a,b", 1, "expected numbers like 8,0"),
        ("--moe-layer-freq [1]*3+x", 1, "expected a number or a list"),
        ("--swiglu --squared-relu", 1, "exclude each other"),
        ("--trace --trace-iterations 5-2", 1, "--trace-iterations: .*runs backwards"),
        ("--trace --trace-interval 0", 1, "--trace-interval 0: must be at least 1"),
        ("--swiglu --hidden-size 16", 1, "--hidden-size 16.* give --ffn-hidden-size"),
        ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 is not below --train-iters 10"),
        ("--lr-warmup-iters 4 --lr-decay-iters 4", 1, "4 is not below --lr-decay-iters 4"),
        ("--lr-warmup-fraction 1", 1, "must be at least 0 and below 1"),
        ("--lr-warmup-init 1", 1, "--lr-warmup-init 1.0 is above --lr"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", 1, "fraction excludes --lr-warmup-iters"),
        ("--clip-grad inf", 1, "--clip-grad inf: must be finite"),
        ("--num-distributed-optimizer-instances 3", 2, "instances 3 does not divide 2 data-par"),
        ("--num-distributed-optimizer-instances 0", 2, "instances 0 does not divide 2 data-par"),
        ("--seq-length 30 --context-parallel-size 2", 2, "30 is not a multiple of twice"),
        ("--account-for-loss-in-pipeline-split --pipeline-model-parallel-size 2", 2,
         "--num-layers 9 is not divisible by --pipeline-model-parallel-size 2"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
         "--global-batch-size 8 --no-overlap-p2p-communication", 2,
         "with virtual stages needs --pipeline-model-parallel-size of at least 3"),
        ("--num-experts 4 --no-bias-gelu-fusion --expert-model-parallel-size 2 "
         "--tensor-model-parallel-size 2 --sequence-parallel", 4,
         "--expert-tensor-parallel-size 2 .*: split experts have no bias"),
        ("--lr-decay-style WSD", 1, "--train-iters needs --lr-wsd-decay-iters"),
        ("--weight-decay-incr-style linear --start-weight-decay 0.3 --end-weight-decay 0.1", 1,
         "weight decay goes from 0.3 to 0.1"),
        ("--group-query-attention --num-query-groups 3", 1, "not divisible by --num-query-groups"),
        ("--group-query-attention --num-query-groups 0", 1, "groups 0: must be at least 1"),
        ("--position-embedding-type rope --kv-channels 7", 1, "7 of --kv-channels 7 .* is odd"),
        ("--position-embedding-type rope --kv-channels 6 --rotary-percent 0.5", 1,
         r"3 of --kv-channels 6 \(--rotary-percent 0.5\) is odd"),
        ("--position-embedding-type yarn", 1, "needs --yarn-original-max-position-embeddings"),
        (f"{YARN} --rotary-scaling-factor 0.5", 1, "--rotary-scaling-factor 0.5: must be at least"),
        (f"{YARN} --yarn-beta-fast 1", 1, "--yarn-beta-fast 1.0: must be above --yarn-beta-slow 1"),
        (f"{YARN} --rotary-percent 0.5", 1, "yarn does not go with --rotary-percent 0.5"),
        (f"{YARN} --rotary-interleaved", 1, "yarn does not go with --rotary-interleaved"),
        ("--hidden-dropout 2", 1, "--hidden-dropout 2.0: must be between 0 and 1"),
        ("--adam-beta1 1", 1, "--adam-beta1 1.0: must be at least 0 and below 1"),
        ("--seed -1", 1, "--seed -1: must be between"),
        ("--fp16 --loss-scale-window 0", 1, "--loss-scale-window 0.0: must be above 0"),
        ("--fp16 --initial-loss-scale 0.5", 1, "0.5 is below --min-loss-scale"),
        ("--optimizer sgd --use-distributed-optimizer", 1, "sgd does not go with"),
        ("--transformer-impl transformer_engine", 1, "_engine needs .* on the CPU; .* local"),
        ("--use-precision-aware-optimizer", 1, "needs Transformer Engine, whose kernels run on G"),
        ("--recompute-granularity selective --recompute-modules core_attn layernorm", 1,
         "--recompute-modules layernorm needs Transformer Engine"),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", 1,
         "--recompute-modules mlp does not go with biases"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 3", 1,
         "the 8 layers of a virtual stage are no multiple of --recompute-num-layers 3"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 9", 2,
         "leave -1 for 1 other stages"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
         "--decoder-last-pipeline-num-layers 4", 2,
         "3 and 4 of --num-layers 8 leave 1 for 0 other"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
         "--num-virtual-stages-per-pipeline-rank 2 --use-dpp", 2,
         "3 layers cannot be cut into 2 virtual stages"),
        ("--pipeline-model-parallel-layout Et8|xL", 1, "Et8.xL: 8 x is none of E"),
        ("--pipeline-model-parallel-layout Et*7|L", 1, "has 7 layers t, --num-layers is 8"),
        ("--pipeline-model-parallel-layout t*8|EL", 1, "begins with the embedding E"),
        ("--pipeline-model-parallel-layout Et*7|Lt", 1, "ends with the loss L"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
         "--global-batch-size 10", 2, "5 microbatches .* in groups of 2"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
         "--global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 5", 2,
         "4 microbatches .* in groups of 5"),
    ],
)  # fmt: skip
def test_refusals_name_the_flag(more: str, world_size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(more, world_size)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose device is not known yet, or is a GPU."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for device in ("auto", "cuda"):
        flags = f"{MINIMUM} --device {device} --transformer-impl transformer_engine"
        with pytest.raises(ConfigError, match="needs Transformer Engine, which is not installed"):
            validate(parse_args(flags.split()), 1)


GROUPED = (
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--global-batch-size 12 --microbatch-group-size-per-virtual-pipeline-stage 4"
)
LENGTHS = "--variable-length --data-path x"


@pytest.mark.parametrize(
    ("more", "world_size", "name", "value"),
    [
        ("--sequence-parallel", 1, "sequence_parallel", False),
        ("--sequence-parallel --tensor-model-parallel-size 2", 2, "sequence_parallel", True),
        ("--fp16", 1, "check_for_nan_in_loss_and_grad", False),
        ("--fp16 --loss-scale 8", 1, "check_for_nan_in_loss_and_grad", True),
        ("--bf16 --grad-reduce-in-bf16", 1, "accumulate_allreduce_grads_in_fp32", False),
        ("--save-interval 4 --save-retain-interval 8", 1, "save_retain_interval", 8),
        (f"{EXPERTS} --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn "
         "--moe-aux-loss-coeff 0", 1, "moe_router_topk", 1),
        ("--account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split "
         "--pipeline-model-parallel-size 2", 2, "virtual_pipeline_model_parallel_size", None),
        (GROUPED, 2, "microbatch_group_size_per_vp_stage", 4),
        (f"{LENGTHS} --context-parallel-size 2", 2, "length_multiple", 4),
        (f"{LENGTHS} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
         4, "length_multiple", 8),
        (f"{LENGTHS} --tensor-model-parallel-size 2", 2, "length_multiple", 1),
        (f"{LENGTHS} --pipeline-model-parallel-size 2", 2, "variable_seq_lengths", True),
        (f"{LENGTHS} --pipeline-model-parallel-size 2 --dpp-transport shm", 2,
         "variable_seq_lengths", False),
        (f"{LENGTHS} --pipeline-model-parallel-size 2 --use-dpp", 2, "variable_seq_lengths", False),
    ],
)  # fmt: skip
def test_values_follow_from_several_flags(
    more: str, world_size: int, name: str, value: object
) -> None:
    args = checked(more, world_size, without="--mock-data" if "--data-path" in more else "")
    assert getattr(args, name) == value


def test_a_run_that_only_evaluates_needs_no_interval() -> None:
    with pytest.raises(ConfigError, match="--eval-interval is required"):
        checked("--eval-iters 3", without="--eval-interval")
    for more in ("--eval-iters 3 --skip-train", "--eval-iters 0"):
        assert checked(more, without="--eval-interval").eval_interval is None


def test_data_without_shares_are_split_as_megatron_does() -> None:
    for more in ("--data-path x", "--data-args-path x"):
        assert checked(more, without="--mock-data").split == "969, 30, 1"
        assert checked(f"{more} --split 1,1,1", without="--mock-data").split == "1,1,1"
    assert checked("--train-data-path x", without="--mock-data").split is None


@pytest.mark.parametrize("words", [["--seq-length=32"], ["--seq-length", "32"]])
def test_a_flag_is_given_with_an_equals_sign_too(words: list[str]) -> None:
    assert parse_args(words).given == {"seq_length": "--seq-length"}


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "expert_tensor", "replicas"),
    [(2, 1, 3, 1, 3), (1, 1, 4, 1, 4), (2, 2, 2, 2, 1), (4, 1, 2, 1, 1), (2, 1, 4, 2, 4)],
)
def test_replicas_that_share_experts_go_in_step(
    tensor: int, context: int, expert: int, expert_tensor: int, replicas: int
) -> None:
    values = {
        "num_experts": 8, "data_parallel_size": 16, "moe_router_load_balancing_type": "aux_loss",
        "tensor_model_parallel_size": tensor, "context_parallel_size": context,
        "expert_model_parallel_size": expert, "expert_tensor_parallel_size": expert_tensor,
    }  # fmt: skip
    assert replicas_in_step(Namespace(**values)) == replicas
    everywhere = {"moe_router_load_balancing_type": ["global_aux_loss"]}
    assert replicas_in_step(Namespace(**values | everywhere)) == 16
    assert replicas_in_step(Namespace(**values | {"num_experts": None})) == 1


def test_dpp_flags_come_from_the_configuration() -> None:
    args = checked("--use-dpp --dpp-slots 3 --no-dpp-split-backward --workload 7 --dpp-record x")
    config = args.dpp
    assert (config.slots, config.split_backward, config.workload, config.record) == (
        3, "off", 7, "x",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--dpp-transport pigeon"):
        checked("--use-dpp --dpp-transport pigeon")


def test_checked_settings_are_frozen() -> None:
    args = checked("--dpp-slots 3")
    with pytest.raises(AttributeError, match=r"lr: checked settings are frozen; with_\(lr="):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="frozen"):
        del args.lr
    other = args.with_(lr=1.0, dpp_slots=4)
    assert (args.lr, args.dpp.slots, other.lr, other.dpp.slots) == (1e-3, 3, 1.0, 4)
    assert other.given == args.given and other.parsed == args.parsed
    assert not {"given", "parsed", "dpp"} & set(vars(args))
    parsed = parse_args(MINIMUM.split())
    validate(parsed, 1)
    assert parsed.ffn_hidden_size is None  # its input stays as it was


def test_fields_are_spelt_as_in_megatron_lm() -> None:
    args = checked("--disable-bias-linear --norm-epsilon 1e-3 --normalization RMSNorm")
    assert (args.add_bias_linear, args.layernorm_epsilon, args.bias_gelu_fusion) == (
        False, 1e-3, False,
    )  # fmt: skip
    args = checked("--window-size 8,0 --no-rope-freq ([0]*3+[1])*2 --group-query-attention")
    assert args.window_size == (8, 0)
    assert args.no_rope_freq == [0, 0, 0, 1] * 2
    assert args.num_query_groups == 1
    args = parse_args([*MINIMUM.split(), "--kv-lora-rank", "16"])
    assert (args.kv_lora_rank, args.q_lora_rank, args.rope_type) == (16, None, None)


OURS = {
    "--dpp-policy": "megatron", "--dpp-activation-cap": "strict", "--no-dpp-split-backward": "",
    "--dpp-lookahead": "1", "--no-dpp-launch-ahead": "", "--dpp-max-tokens": "9",
    "--dpp-record": "x", "--dpp-replay": "y", "--dpp-forward-only-order": "megatron",
    "--dpp-head-in-forward": "off", "--dpp-slice-tokens": "off",
    "--dpp-transport": "shm", "--dpp-slots": "3", "--workload": "7", "--dpp-gpudirect": "off",
    "--dpp-rdma-devices": "nearest", "--dpp-rdma-traffic-class": "96",
    "--dpp-rdma-service-level": "1", "--dpp-rdma-pkey-index": "1", "--dpp-rdma-gid-index": "3",
    "--dpp-rdma-timeout": "18", "--dpp-rdma-retries": "5", "--dpp-rdma-adaptive-routing": "on",
    "--dpp-timeout": "5", "--dpp-checksum": "", "--dpp-peer-timeout": "9",
    "--dpp-token-file": "token", "--dpp-listen-ports": "29700-29763",
    "--dpp-tcp-connections": "2",
    "--no-dpp-task-rng": "", "--dpp-cuda-graphs": "on", "--dpp-inject": "jitter:0.1",
    "--node-ips": "10.0.0.1", "--dpp-length-buckets": "off",
}  # fmt: skip
DYNAMIC = set(list(OURS)[:11])
LINKS = set(list(OURS)[11:29])


def idle(more: str, *flags: str, world_size: int = 1) -> set[str]:
    """Our flags that ``warnings_of`` names."""
    words = " ".join(f"{flag} {OURS[flag]}" for flag in flags or OURS)
    lines = warnings_of(checked(f"{more} {words}", world_size))
    assert all(" has no effect with" in line for line in lines)
    return {line.split()[0] for line in lines}


def test_our_flags_without_effect_are_named() -> None:
    pipeline = "--pipeline-model-parallel-size 2"
    words = [word for pair in OURS.items() for word in pair if word]
    assert set(parse_args(words).given) == {f"dpp_{field.name}" for field in option_fields()}
    assert not idle("--use-dpp")
    assert not idle(f"{pipeline} --use-dpp", world_size=2)
    assert idle(pipeline, world_size=2) == DYNAMIC
    assert idle("") == DYNAMIC | LINKS | {"--no-dpp-task-rng"}
    links = LINKS - {"--dpp-transport"}
    assert idle(pipeline, *links, world_size=2) == links
    assert warnings_of(checked(f"{pipeline} --dpp-slots 3", 2)) == [
        "--dpp-slots has no effect without --use-dpp or a --dpp-transport other than auto"
    ]


def test_auto_is_the_dynamic_pipelines() -> None:
    for flag in ("--dpp-transport auto", "--dpp-cuda-graphs auto"):
        words = f"{flag} --pipeline-model-parallel-size 2"
        assert warnings_of(checked(words, 2)) == [f"{flag} has no effect without --use-dpp"]
        assert not warnings_of(checked(f"{words} --use-dpp", 2))
    assert not warnings_of(checked("--dpp-cuda-graphs off"))


def test_deepspeeds_engine_takes_none_of_our_flags() -> None:
    args = checked(" ".join(f"{flag} {value}" for flag, value in OURS.items()))
    args = args.with_(deepspeed_zero_stage=1)  # after the check, which asks for the package
    assert warnings_of(args) == [
        f"{args.given[f'dpp_{field.name}']} has no effect with --deepspeed-zero-stage"
        for field in option_fields()
    ]


def test_flags_without_effect_are_named_as_they_were_given() -> None:
    given = "--num-gpus 8 --no-scatter-gather-tensors-in-pipeline --no-dpp-split-backward"
    assert warnings_of(checked(given)) == [
        "--no-scatter-gather-tensors-in-pipeline has no effect",
        "--num-gpus has no effect",
        "--no-dpp-split-backward has no effect without --use-dpp",
    ]
    assert not warnings_of(checked("--log-timers-to-tensorboard"))
    decoder = checked("--decoder-seq-length 5")
    assert warnings_of(decoder) == ["--decoder-seq-length has no effect"]
    assert decoder.decoder_seq_length is None  # megatron-core's schedules read it


def test_iterations_that_a_loss_scale_may_cost_are_counted() -> None:
    scale = "--fp16 --hysteresis 2 --initial-loss-scale"
    (line,) = warnings_of(checked(f"{scale} {2**20}"))
    assert "up to 5 of 10" in line and "--initial-loss-scale 65536 suits" in line
    assert not warnings_of(checked(f"{scale} 65536"))
    assert not warnings_of(checked(f"{scale} {2**20} --loss-scale 8"))


@pytest.mark.parametrize(
    ("more", "arch", "words"),
    [
        ("", None, "in one stage the output layer's weight is the embedding's"),
        (
            "--mtp-num-layers 1 --position-embedding-type rope",
            None,
            "--mtp-num-layers 1 runs the output layer several times",
        ),
        ("", "bert", "BERT's binary head reads the hidden states"),
    ],
)
def test_a_head_that_cannot_run_in_forward_is_refused(
    more: str, arch: str | None, words: str
) -> None:
    given = parse_args([*MINIMUM.split(), "--dpp-head-in-forward", "on", *more.split()])
    with pytest.raises(ConfigError, match=f"--dpp-head-in-forward on: .*{words}"):
        validate(given, 1, arch)
    checked("--dpp-head-in-forward on --untie-embeddings-and-output-weights")
