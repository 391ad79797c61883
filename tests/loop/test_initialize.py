"""A rank joins a job: the groups, seeds and batch sizes that it hands to megatron-core."""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.errors import PeerDead, program
from megatron.dpp_train import initialize as joining
from megatron.dpp_train.loop.pretrain import main
from megatron.dpp_train.options.run_config import Settings
from tests.runtime.launcher import free_port, start, wait

ARGS = {
    "device": "cuda", "local_rank": None, "distributed_backend": "nccl",
    "gradient_accumulation_fusion": False, "variable_lengths": False,
    "deterministic_mode": False, "world_size": 64, "async_save": False,
    "nccl_ub": False, "use_persistent_ckpt_worker": False,
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3,
    "virtual_pipeline_model_parallel_size": 4, "context_parallel_size": 5,
    "hierarchical_context_parallel_sizes": [6], "expert_model_parallel_size": 7,
    "expert_tensor_parallel_size": 8, "num_distributed_optimizer_instances": 9,
    "distributed_timeout_minutes": 10, "nccl_communicator_config_path": "eleven",
    "high_priority_stream_groups": ("twelve",), "use_tp_pp_dp_mapping": False,
    "enable_gloo_process_groups": True, "rampup_batch_size": [13, 14, 15],
    "global_batch_size": 16, "micro_batch_size": 17, "data_parallel_size": 18,
    "decrease_batch_size_if_needed": True, "timing_log_level": 0, "timing_log_option": "minmax",
}  # fmt: skip


def join(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """The arguments of each function that ``initialize`` calls, by its name, and the run."""
    given: dict[str, Any] = {}

    def note(name: str, result: Any = None) -> Any:
        def call(*words: Any, **options: Any) -> Any:
            given[name] = (words, options)
            return result

        return call

    monkeypatch.setattr(joining.dist, "init_process_group", note("join"))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(joining, "rendezvous", lambda *_, **__: iter([(HashStore(), 5, 64)]))
    monkeypatch.setattr(torch.cuda, "set_device", note("device"))
    monkeypatch.setattr(joining, "check_agreement", note("agree"))
    monkeypatch.setattr(joining, "set_seeds", note("seeds"))
    monkeypatch.setattr(joining, "register_safe_globals", note("safe"))
    default = HashStore()
    holder = SimpleNamespace(_get_default_store=lambda: default)
    monkeypatch.setattr(joining.dist, "distributed_c10d", holder)
    monkeypatch.setattr(
        joining, "parallel_state", SimpleNamespace(initialize_model_parallel=note("groups"))
    )
    calculator = SimpleNamespace(init_num_microbatches_calculator=note("batches"))
    monkeypatch.setattr(joining, "num_microbatches_calculator", calculator)
    machine: Any = SimpleNamespace(
        initialize_rerun_state_machine=note("machine"),
        RerunMode=SimpleNamespace(DISABLED="disabled"),
    )
    monkeypatch.setattr(joining, "rerun_state_machine", machine)
    args: Any = Settings.of(ARGS | changes)
    run = joining.initialize(args, 5)
    assert (run.args, run.rank) == (args, 5)
    given["run"] = run
    return given


def test_groups_have_the_sizes_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    words, options = join(monkeypatch)["groups"]
    assert words == (2, 3, 4)
    assert options == {
        "context_parallel_size": 5, "hierarchical_context_parallel_sizes": [6],
        "expert_model_parallel_size": 7, "expert_tensor_parallel_size": 8,
        "num_distributed_optimizer_instances": 9, "distributed_timeout_minutes": 10,
        "nccl_communicator_config_path": "eleven", "high_priority_stream_groups": ["twelve"],
        "order": "tp-cp-ep-dp-pp", "create_gloo_process_groups": True,
    }  # fmt: skip
    _, mapped = join(monkeypatch, use_tp_pp_dp_mapping=True)["groups"]
    assert mapped["order"] == "tp-cp-ep-pp-dp"


def test_the_batch_grows_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    given = join(monkeypatch)
    assert given["batches"] == ((5, [13, 14, 15], 16, 17, 18, True), {})
    assert given["machine"] == ((), {"mode": "disabled"})
    assert given["agree"][0][1:3] == (5, 64)


def seeds(monkeypatch: pytest.MonkeyPatch, *, own: bool, **ranks: int) -> tuple[Any, ...]:
    """The seed of a rank's generators of each kind."""
    kinds = ("pipeline_model_parallel", "data_parallel", "tensor_model_parallel")
    groups = {f"get_{kind}_rank": functools.partial(ranks.get, kind, 0) for kind in kinds}
    monkeypatch.setattr(joining, "parallel_state", SimpleNamespace(**groups))
    told: list[Any] = []
    for holder, name in ((random, "seed"), (np.random, "seed"), (torch, "manual_seed")):
        monkeypatch.setattr(holder, name, told.append)
    parallel = SimpleNamespace(model_parallel_cuda_manual_seed=lambda *given: told.append(given))
    monkeypatch.setattr(joining, "tensor_parallel", parallel)
    args: Any = argparse.Namespace(
        seed=7, data_parallel_random_init=own, te_rng_tracker="te", inference_rng_tracker="inf"
    )
    joining.set_seeds(args)
    assert told[0] == told[1] == told[2] == told[3][0]
    assert told[3][1:] == ("te", "inf")
    return (told[0],)


def test_stages_draw_their_own_numbers_and_replicas_only_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = {"pipeline_model_parallel": 3, "data_parallel": 2, "tensor_model_parallel": 1}
    assert seeds(monkeypatch, own=False) == seeds(monkeypatch, own=True) == (7,)
    assert seeds(monkeypatch, own=False, **ranks) == (307,)
    assert seeds(monkeypatch, own=True, **ranks) == (327,)


@pytest.mark.parametrize("launched", [True, False])
def test_a_collective_may_take_as_many_minutes_as_the_flag_says(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "here")
    if not launched:
        monkeypatch.delenv("MASTER_ADDR")
    given = join(monkeypatch, distributed_timeout_minutes=7)["join"][1]
    assert given.pop("timeout") == timedelta(seconds=7 * 60)
    assert given.pop("store").get("dpp/process/5").startswith(f"{os.getpid()} ".encode())
    assert given == {"backend": "nccl", "rank": 5, "world_size": 64}


def test_a_meeting_that_fails_names_who_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in 28 lines of PyTorch's, which name a key of the store."""

    def fail(**_: Any) -> None:
        raise torch.distributed.DistStoreError("wait timeout after 60000ms, keys: /0//cpu//0/1")

    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr("megatron.dpp.core.cpu.install", lambda: None)  # they would stay
    changes = {"world_size": 7, "distributed_timeout_minutes": 1, "device": "cpu"}
    with monkeypatch.context() as patch:
        patch.setattr(joining, "rendezvous", lambda *_, **__: iter([(HashStore(), 5, 7)]))
        patch.setattr(joining.dist, "init_process_group", fail)
        args: Any = Settings.of(ARGS | changes)
        with pytest.raises(PeerDead) as raised:
            joining.initialize(args, 5)
    said = str(raised.value)
    assert said.startswith("the ranks did not meet (--distributed-timeout-minutes 1): wait timeout")
    assert "rank 0 has not come; " in said and said.endswith("rank 6 has not come")
    assert "rank 5" not in said


def test_a_rank_0_that_never_comes_is_waited_for_as_long_as_the_flag_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch tried a second time: with one minute allowed, two and a half passed."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(joining, "rendezvous", lambda *_, **__: pytest.fail("it tried itself"))
    monkeypatch.setattr("megatron.dpp.core.cpu.install", lambda: None)  # they would stay
    args: Any = Settings.of(ARGS | {"distributed_timeout_minutes": 0.01, "device": "cpu"})
    said = r"MASTER_ADDR=127.0.0.1 MASTER_PORT=\d+: Connection refused: rank 0 has not come"
    with pytest.raises(PeerDead, match=said):
        joining.initialize(args, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("RANK=one", "RANK=one: expected a number, as torchrun sets it"),
        ("RANK=2 WORLD_SIZE=2", "RANK=2: must be below WORLD_SIZE=2"),
        ("LOCAL_RANK=-1", "LOCAL_RANK=-1: expected a number, as torchrun sets it"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2 without MASTER_ADDR: start the ranks by torchrun, or name "
         "the host and the port of rank 0"),
        ("WORLD_SIZE=2 MASTER_ADDR=here", "MASTER_PORT=: expected a port, 1 to 65535"),
        ("MASTER_ADDR=here MASTER_PORT=70000", "MASTER_PORT=70000: expected a port, 1 to 65535"),
    ],
)  # fmt: skip
def test_variables_of_a_launcher_that_cannot_be_are_refused(
    given: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They ended in tracebacks; ranks without an address waited for each other."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for one in given.split():
        monkeypatch.setenv(*one.split("="))
    words = "--device cpu --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 "
    words += "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data "
    words += "--tokenizer-type NullTokenizer --vocab-size 9 --eval-iters 0"
    assert main("gpt", f"{words} --transformer-impl local".split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"{program()}: error: {said}"


def test_a_rank_prepares_pytorch_as_its_flags_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.dpp.core.wgrad import fused

    told: list[Any] = []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: told.append(("same", on)))
    monkeypatch.setattr(
        torch.backends.cuda, "enable_cudnn_sdp", lambda on: told.append(("cudnn", on))
    )
    monkeypatch.setattr(fused, "provide", lambda: told.append("fused"))
    monkeypatch.setattr(joining, "expand_segments", lambda: told.append("segments"))
    assert "safe" in join(monkeypatch) and not told
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    join(
        monkeypatch, gradient_accumulation_fusion=True, variable_lengths=True,
        deterministic_mode=True,
    )  # fmt: skip
    assert told == ["fused", ("cudnn", False), "segments", ("same", True)]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("variable", "flag", "place"), [("3", 1, 3), (None, 2, 2), (None, None, 0)]
)
def test_a_rank_takes_the_gpu_of_its_place_on_the_node(
    variable: str | None, flag: int | None, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers set the variable; the flag is for those that do not."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_RANK", variable)
    given = join(monkeypatch, local_rank=flag)
    assert given["device"][0] == (torch.device("cuda", place),)
    assert given["run"].device == torch.device("cuda", place)


def test_a_rank_without_a_gpu_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.dpp.core.cpu.install", lambda: "support")
    given = join(monkeypatch, device="cpu", local_rank=3)
    assert "device" not in given
    assert (given["run"].device, given["run"].cpu_support) == (torch.device("cpu"), "support")


def test_expanded_segments_are_not_registered_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    joining.expand_segments()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"


def test_an_empty_setting_of_the_allocator_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    for name in names:
        monkeypatch.setenv(name, "")
    joining.expand_segments()
    made = {name: os.environ[name] for name in names & set(os.environ)}
    assert list(made.values()) == ["expandable_segments:True"]
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"


def test_a_long_line_for_the_other_node_is_cut_in_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(joining.dist, "broadcast", lambda line, src: sent.append(line))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    args: Any = argparse.Namespace(world_size=2)
    run = joining.Run(args=args, rank=1, device=torch.device("cpu"), timers=None)
    run.say_ends("é" * 1000)
    assert bytes(sent[0].tolist()).decode() == "é" * 512
    assert capsys.readouterr().out == "é" * 1000 + "\n"


@pytest.mark.parametrize(("local", "crosses"), [(None, False), ("4", False), ("2", True)])
@pytest.mark.parametrize("rank", [0, 3])
def test_the_last_line_is_printed_once_on_each_end_of_a_job(
    local: str | None, crosses: bool, rank: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On one node, as without a launcher that says otherwise, once in all."""
    sent: list[int] = []

    def broadcast(line: torch.Tensor, src: int) -> None:
        sent.append(src)
        line[:4] = torch.tensor(list(b"last"))

    monkeypatch.setattr(joining.dist, "broadcast", broadcast)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    args: Any = argparse.Namespace(world_size=4)
    joining.Run(args=args, rank=rank, device=torch.device("cpu"), timers=None).say_ends("last")
    assert sent == [3] * crosses
    assert capsys.readouterr().out == "last\n" * (rank == 3 or crosses)


def test_a_rank_that_is_killed_within_a_run_is_named() -> None:
    """Ranks looked for its process in another store than the one that it was announced in, and
    said of all that they had not come."""
    worker = Path(__file__).with_name("lost_rank_worker.py")
    first, lost = wait(start(worker, 2, []), 120)
    assert lost.returncode == -signal.SIGKILL
    assert f"rank 1 (process {int(lost.output.split()[-1])}) has ended" in first.output
