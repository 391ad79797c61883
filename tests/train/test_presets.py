"""``megatron-dpp train`` and the launch scripts up to the command that they would run."""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.dpp.__main__ import main
from megatron.dpp.errors import ConfigError
from megatron.dpp.files.locks import lock_directory
from megatron.dpp_train.presets import flag_table
from megatron.dpp_train.presets.checks import check_direct, parse
from megatron.dpp_train.presets.nodes import Nodes, find_nodes, meet
from megatron.dpp_train.presets.plan import of_options
from megatron.dpp_train.presets.start import environment
from tests.conftest import REPOSITORY
from tests.train.runs import write_corpus

Train = Callable[..., tuple[int, str, str]]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs ``train`` with a command line and variables, without GPUs: status and both outputs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flag_table.table()

    def run(words: str, **variables: str) -> tuple[int, str, str]:
        with monkeypatch.context() as inside:
            for name, value in variables.items():
                inside.setenv(name, value)
            status = main(["train", *shlex.split(words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def flags_of(out: str) -> dict[str, Any]:
    """The training script's flags of a printed command; unknown ones raise."""
    words = shlex.split(out.splitlines()[-1])
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return parse(words[script + 1 :], flag_table.table())


LAYOUTS = {
    "--mode simple --procs 2": {},
    "--mode 3d --procs 2": {"pipeline_model_parallel_size": 2, "use_dpp": True},
    "--mode 3d --procs 2 --pp 2 --no-dpp": {"pipeline_model_parallel_size": 2},
    "--mode 3d --procs 8 --tp 2 --pp 2 --chunks 2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "make_vocab_size_divisible_by": 512,
        "use_dpp": True,
    },
    "--mode 3d --procs 2 --ep 2 --model sample-experts": {"expert_model_parallel_size": 2},
    "--mode megatron --procs 2 --pipeline-model-parallel-size 2": {
        "pipeline_model_parallel_size": 2
    },
    "--mode zero --procs 2": {"use_distributed_optimizer": True},
    "--mode deepspeed --procs 2 --zero-stage 3": {"use_torch_fsdp2": True},
    "--mode zero --procs 2 --zero-stage 0": {},
    "--mode 3d --procs 4 --pp 4 --batch-size 8": {
        "pipeline_model_parallel_size": 4,
        "use_dpp": True,
        "micro_batch_size": 2,
    },
    "--mode 3d --procs 3 --pp 3 --chunks 2 --num-layers 6 --no-dpp": {
        "pipeline_model_parallel_size": 3,
        "num_virtual_stages_per_pipeline_rank": 2,
        "global_batch_size": 33,
    },
    "--mode simple --seq-length 64 --max-position-embeddings 32 --position-embedding-type rope": {},
    "--mode simple --hidden-size 2048 --save-hf out": {
        "num_attention_heads": 16,
        "save_interval": 1000,
    },
    "--mode simple --num-gpus 8 --gpu H100": {
        "bf16": True,
        "transformer_impl": "transformer_engine",
    },
}
"""Command line -> flags of its layout."""


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_mode_sets_the_flags_of_its_layout(words: str, train: Train) -> None:
    status, out, err = train(f"{words} --dry-run")
    assert status == 0, err
    found = flags_of(out)
    layout = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "use_dpp",
              "num_virtual_stages_per_pipeline_rank", "use_distributed_optimizer",
              "use_torch_fsdp2", "expert_model_parallel_size"}  # fmt: skip
    assert LAYOUTS[words].items() <= found.items()
    assert not (layout - set(LAYOUTS[words])) & set(found)
    assert found["train_iters"] == found["lr_decay_iters"] == 50


REFUSED = {
    "--mode simple --max-stps 4": "unknown flag --max-stps (did you mean --max-steps?)",
    "--mode simple --num-layer 4": "unknown flag --num-layer (did you mean --num-layers?)",
    "--mode simpel": "--mode simpel (did you mean simple?)",
    "--mode simple x": "unexpected argument 'x'",
    "--model smal": "nearest: small",
    "--mode simple --model .": "config.json",
    "--mode simple --engine deepspeed": "options of --mode deepspeed",
    "--procs 0": "--procs: give a value above 0",
    "--mode simple --tp 0": "--tensor-model-parallel-size 0: expected a whole number",
    "--mode simple --lr abc": "argument --lr: invalid float value: 'abc'",
    "--mode simple --lr 0": "--lr 0: must be above 0",
    "--mode simple --seed x": "argument --seed: invalid int value: 'x'",
    "--mode simple --seed": "argument --seed: expected one argument",
    "--mode simple --bf16=yes": "unexpected argument 'yes'",
    "--mode simple --lr-decay-style cosin": "argument --lr-decay-style: invalid choice: 'cosin'",
    "--mode simple --micro-batch-size 0": "--micro-batch-size 0: expected a whole number",
    "--mode simple --vocab-file no.json --merge-file no": "--vocab-file no.json: no such file",
    "--mode simple --data no.jsonl --tokenizer sample": "--data no.jsonl: no such file",
    "--mode simple --data-path no": "--data-path no: no.idx is missing",
    "--mode simple --data-path half": "half.bin is missing",
    "--mode simple --resume-from no": "--resume-from no: no checkpoint is there",
    "--mode simple --load no --finetune": "--load no: no such directory",
    "--mode simple --bf16 --fp32": "--fp32 and --bf16 exclude each other",
    "--gpus 4": "--gpus 4: this node has 0; use --procs 4",
    "--gpus 4 --gpu H100": "only a plan can be made for it; add --dry-run",
    "--mode simple --config no.yaml": "no.yaml: No such file",
    "--mode 3d --procs 4 --tp 3": "4 processes cannot be divided by",
    "--mode 3d --procs 2 --pp 2 --num-layers 7": "--num-layers 7 cannot be divided by",
    "--mode 3d --procs 8 --tp 8": "--num-attention-heads 4 cannot be divided by",
    "--mode simple --hidden-size 130": "--hidden-size 130 cannot be divided by",
    "--mode simple --seq-length 9 --max-position-embeddings 8": "--seq-length 9 is above",
    "--mode 3d --procs 2 --cp 2 --seq-length 126": "divided by 2 halves x --context-parallel-size",
    "--mode simple --procs 3 --batch-size 32": "--global-batch-size 32 cannot be divided by 3",
    "--mode zero --engine deepspeed": "DeepSpeed is not installed",
}
"""Command line -> part of its one line."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_one_line_within_two_seconds(
    words: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.idx").touch()
    began = time.process_time()
    status, out, err = train(words)
    assert time.process_time() - began < 2
    assert (status, out) == (2, ""), out
    (line,) = err.splitlines()
    assert REFUSED[words] in line


VARIABLES = {
    "NUM_LAYERS=7": "NUM_LAYERS=7 cannot be divided by PIPELINE_PARALLEL=2 x 2 chunks = 4",
    "GLOBAL_BATCH_SIZE=30": "GLOBAL_BATCH_SIZE=30 cannot be divided by MICRO_BATCH_SIZE=4",
    "HIDDEN_SIZE=130": "HIDDEN_SIZE=130 cannot be divided by NUM_ATTENTION_HEADS=4",
    "TRAIN_ITERS=x": "argument TRAIN_ITERS: invalid int value: 'x'",
    "PIPELINE_PARALLEL=3": "divided by TENSOR_PARALLEL=2 x PIPELINE_PARALLEL=3 = 6",
    "PRECISION=fp8": "PRECISION=fp8: expected one of fp32, bf16, fp16",
    "USE_DPP=2": "USE_DPP=2: expected one of 0, 1",
    "VOCAB_FILE=no": "VOCAB_FILE=no: no such file",
    "NUM_NODES=2": "NODE_RANK is not set",
    "MASTER_PORT=x": "MASTER_PORT=x: must be a whole number from 1 to 65535",
}


@pytest.mark.parametrize("setting", VARIABLES)
def test_a_launch_script_names_the_variable(setting: str, train: Train) -> None:
    name, _, value = setting.partition("=")
    more = {"DRY_RUN": "1", "PIPELINE_PARALEL": "4", name: value}
    status, _, err = train("--preset gpt-sample node", **more)
    assert status == 2
    warning, line = err.splitlines()
    assert warning.endswith("(did you mean PIPELINE_PARALLEL?)")
    assert VARIABLES[setting] in line


def test_token_files_of_ones_own_have_the_vocabulary_of_the_sample(
    train: Train, tmp_path: Path
) -> None:
    prefix = write_corpus(tmp_path / "own", [40] * 9, words=1000).split()[1]
    status, out, err = train("--preset gpt-sample node", DRY_RUN="1", DATA_PATH=prefix)
    assert status == 0, err
    assert "datasets_gpt/vocab.json" in out and "datasets_gpt/merges.txt" in out


@pytest.mark.parametrize(("number", "split"), [(99, "1,0,0"), (999, "95,5,0"), (1000, "949,50,1")])
def test_no_set_that_is_used_is_left_without_documents(
    number: int, split: str, train: Train, tmp_path: Path
) -> None:
    prefix = write_corpus(tmp_path / "own", [4] * number).split()[1]
    status, out, err = train(f"--mode simple --data {prefix} --dry-run")
    assert status == 0, err
    assert flags_of(out)["split"] == split
    words = f"--mode simple --data-path 1 {prefix} 2 {prefix} --tokenizer sample --dry-run"
    assert flags_of(train(words)[1])["data_path"] == ["1", prefix, "2", prefix]


def test_a_recipe_takes_paths_variables_and_flags(train: Train, tmp_path: Path) -> None:
    words = f"--preset gpt node {tmp_path}/ck {tmp_path}/tb --seed 7 --dry-run"
    status, _, err = train(words, GPUS_PER_NODE="4", NUM_LAYERS="32")
    assert status == 2 and "unknown flag --dry-run" in err
    words = words.replace(" --dry-run", "")
    status, out, err = train(words, GPUS_PER_NODE="4", NUM_LAYERS="32", DRY_RUN="1")
    assert status == 0, err
    found = flags_of(out)
    wanted = {"save": f"{tmp_path}/ck", "load": f"{tmp_path}/ck", "tensorboard_dir":
              f"{tmp_path}/tb", "seed": 7, "num_layers": 32, "fp16": True, "use_dpp": True,
              "num_virtual_stages_per_pipeline_rank": 4, "recompute_activations": True}  # fmt: skip
    assert wanted.items() <= found.items()
    assert found["train_iters"] == found["lr_decay_iters"] > 1
    status, out, err = train(words, GPUS_PER_NODE="4", USE_DPP="0", TRACE="1", DRY_RUN="1")
    assert " --dpp-trace-only" in out and "--dpp-trace " not in out, err


def test_the_help_fits_one_screen(train: Train) -> None:
    status, out, _ = train("--help")
    lines = out.splitlines()
    assert status == 0 and len(lines) <= 25 and max(map(len, lines)) <= 80
    assert all(
        f"--mode {each}" in out for each in ("simple", "3d", "megatron", "deepspeed", "auto")
    )


def test_a_config_wins_over_a_model_and_the_command_line_over_both(
    train: Train, tmp_path: Path
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"num-layers": 6, "hidden_size": 256, "bf16": False}))
    status, out, err = train(f"--mode simple --config {file} --num-layers 2 --dry-run")
    assert status == 0, err
    wanted = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128}
    assert wanted.items() <= flags_of(out).items()
    for text, said in (
        ("model: {num_layers: 2}", "expected lines of `flag: value`"),
        ("a: &a [x, x]\nb: [*a, *a]", "expected lines of `flag: value`"),
        ("a: " + "[" * 600, "no YAML file"),
    ):
        file.write_text(text)
        (line,) = train(f"--mode simple --config {file}")[2].splitlines()
        assert said in line


MODELS = sorted(path.stem for path in (REPOSITORY / "configs" / "models").glob("*.yaml"))


def test_every_model_has_flags_of_megatron(train: Train) -> None:
    table = flag_table.table()
    for name in MODELS:
        loaded = yaml.safe_load((REPOSITORY / "configs" / "models" / f"{name}.yaml").read_text())
        assert {f"--{flag}" for flag in loaded} <= set(table), name


SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[03-07],m"}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, (1, 0, "localhost", None)),
        ({"MASTER_PORT": "7000"}, (1, 0, "localhost", 7000)),
        ({"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}, (2, 1, "a", 6000)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2"}, (2, 1, "n03", 6000)),
        ({**SLURM, "MASTER_ADDR": "b"}, (2, 1, "b", 6000)),
    ],
)
def test_nodes_of_the_environment(
    variables: dict[str, str], wanted: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    found = find_nodes(variables)
    assert (found.count, found.rank, found.master, found.port) == wanted
    words = f"--nproc-per-node 4 --nnodes {found.count} "
    words += (
        f"--node-rank {found.rank} --master-addr {found.master} --master-port {found.port} "
        "--rdzv-conf timeout=300"
        if found.port
        else "--standalone"
    )
    assert found.torchrun(4) == words.split()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NUM_NODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2"),
        ({"NUM_NODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NUM_NODES": "0"}, "NUM_NODES=0"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "start one per node"),
        ({**SLURM, "NODE_IPS": "a,b"}, "NODE_IPS=a,b: 'a' does not"),
    ],
)
def test_nodes_that_cannot_be(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        find_nodes(variables)


def test_a_node_has_its_part_of_one_address_per_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        nodes = Nodes(
            count=2, rank=1, master="127.0.0.1", port=master.getsockname()[1], wait=60,
            ips=("203.0.113.1", "203.0.113.2", "127.0.0.1", "127.0.0.1"),
        )  # fmt: skip
        meet(nodes, per_node=2)


@pytest.mark.parametrize(("mode", "queues"), [("simple", "1"), ("zero --zero-stage 2", "8")])
def test_fsdp2_has_several_hardware_queues_beside_tensor_parallelism(
    mode: str, queues: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    found = of_options(f"--mode {mode} --procs 2 --tp 2 --dry-run".split(), {})
    assert environment(found)["CUDA_DEVICE_MAX_CONNECTIONS"] == queues


def test_the_static_schedule_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_DPP", "1")
    for words, wanted in (("--no-dpp", "0"), ("", "1")):
        found = of_options(shlex.split(f"--mode 3d --pp 2 --dry-run {words}"), {})
        assert environment(found)["USE_DPP"] == wanted


def test_a_direct_call_is_checked_on_every_rank_and_answered_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag_table.table()
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            check_direct(["--num-layer", "4"])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == (rank == 0)
    check_direct(["--help"])


def test_a_second_run_in_a_directory_leaves_the_files_of_the_first(
    train: Train, tmp_path: Path
) -> None:
    words = f"--mode simple --procs 1 --mock-data --run-dir {tmp_path}"
    with lock_directory(tmp_path, "here"):
        status, _, err = train(words)
    assert status == 2 and "writes there" in err
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    (tmp_path / "metrics.jsonl").touch()
    status, _, err = train(words)
    assert status == 2 and "metrics.jsonl of an earlier run is there" in err


def test_a_path_that_begins_with_a_dash_is_no_flag(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-a.jsonl").write_text('{"text": "a"}\n')
    Path("-ck").mkdir()
    Path("-ck/latest_checkpointed_iteration.txt").write_text("20")
    words = "--mode simple --data ./-a.jsonl --tokenizer sample --dry-run --resume-from ./-ck"
    status, out, err = train(words)
    assert status == 0, err
    assert " --input=-a.jsonl --output-prefix=-a-" in out
    assert flags_of(out)["data_path"][0].startswith("-a-") and flags_of(out)["load"] == "-ck"


def test_resuming_names_the_step_and_takes_the_rate_of_now(train: Train, tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    for name in ("iter_0000010", "checkpoint-10"):
        status, out, err = train(f"--mode simple --resume-from {tmp_path}/{name} --dry-run")
        assert status == 0, err
        wanted = {"load": str(tmp_path), "ckpt_step": 10, "override_opt_param_scheduler": True,
                  "save": str(tmp_path)}  # fmt: skip
        assert wanted.items() <= flags_of(out).items()


def test_chats_are_tokenized_anew_where_their_template_changes(
    train: Train, tmp_path: Path
) -> None:
    """A folder's chat_template.jinja was left out, and a run took the tokens of the earlier one."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    found = set()
    for template in ("one", "two", "one"):
        (tmp_path / "chat_template.jinja").write_text(template)
        words = f"--mode simple --data {tmp_path}/a.jsonl --tokenizer {tmp_path} --sft --dry-run"
        status, out, err = train(words)
        assert status == 0, err
        found |= {*flags_of(out)["data_path"]}
    assert len(found) == 2


def test_megatron_reads_a_tokenizer_of_hugging_face_by_its_folder(
    train: Train, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        words = f"--mode simple --data {tmp_path}/a.jsonl --tokenizer {name} --dry-run"
        status, out, err = train(words)
        assert status == 0, err
        assert flags_of(out)["tokenizer_model"] == str(tmp_path)
