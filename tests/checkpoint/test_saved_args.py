"""Arguments that a checkpoint holds are read and compared without PyTorch."""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.files import Found
from megatron.dpp_train.checkpoint.saved_args import (
    check_model,
    check_optimizer,
    check_tokens_kept,
    other_slices,
    saved_args,
    take_checkpoint_args,
)
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.preflight.files import check_start
from megatron.dpp_train.tokenizers import NullTokenizer, Tokenizer
from tests.harmful import Harmful

MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "tokenizer_type": "GPT2BPETokenizer",
}
RUN = {
    **MODEL,
    "no_load_optim": False,
    "finetune": False,
    "skip_train": False,
    "use_distributed_optimizer": False,
    "expert_model_parallel_size": 1,
}


def saved_in(folder: Path, **changes: Any) -> Found:
    """A file as megatron-core writes it, beside tensors and classes that nothing here needs."""
    args = argparse.Namespace(**{**RUN, **changes}, params_dtype=torch.bfloat16)
    (folder / "metadata.json").write_text("{}")
    torch.save({"args": args, "state": torch.zeros(3)}, folder / "common.pt")
    return Found(folder, 3)


def test_arguments_are_read_as_they_were(tmp_path: Path) -> None:
    read = saved_args(saved_in(tmp_path))
    assert {name: getattr(read, name) for name in RUN} == RUN


def test_of_a_file_per_rank_the_first_is_read(tmp_path: Path) -> None:
    for stage in (1, 0, 2):
        folder = tmp_path / f"mp_rank_00_00{stage}"
        folder.mkdir()
        torch.save({"args": argparse.Namespace(stage=stage)}, folder / "model_optim_rng.pt")
    assert saved_args(Found(tmp_path, 3)).stage == 0


def test_reading_them_imports_no_torch(tmp_path: Path) -> None:
    saved_in(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from megatron.dpp_train.checkpoint.saved_args import saved_args\n"
        "from megatron.dpp_train.checkpoint.files import Found\n"
        f"print(saved_args(Found(Path({str(tmp_path)!r}), 3)).num_layers, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "4 False\n", result.stderr


@pytest.mark.parametrize("name", ["common.pt", "mp_rank_00/model_optim_rng.pt"])
@pytest.mark.parametrize("flags", [[], ["--use-checkpoint-args"], ["--finetune"]])
def test_a_file_that_would_run_code_is_refused_before_processes_start(
    name: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = files.begin(tmp_path, 3)
    (folder / name).parent.mkdir(exist_ok=True)
    if name == "common.pt":
        (folder / "metadata.json").write_text("{}")
        (folder / ".metadata").touch()
        nothing = argparse.Namespace(storage_data={})
        monkeypatch.setattr(files, "read_pickle", lambda _: nothing)
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("it/data.pkl", pickle.dumps({"args": Harmful(tmp_path / "made")}))
    files.commit(tmp_path, 3)
    act = take_checkpoint_args if "--use-checkpoint-args" in flags else check_start
    rule = rf"iter_0000003/{name}: asks for (posix|nt)\.mkdir, which is not run"
    with pytest.raises(DataError, match=rule) as error:
        act(parse_args(["--load", str(tmp_path), *flags]))
    assert "\n" not in str(error.value) and "unreadable" not in str(error.value)
    assert not (tmp_path / "made").exists()


class Words(Tokenizer):
    def __init__(self, *words: str) -> None:
        super().__init__({word: index for index, word in enumerate(words)}, {}, "now.json")


def test_a_run_goes_on_with_the_tokens_that_its_model_learned(tmp_path: Path) -> None:
    tokens = Words("a", "b").tokens()
    found = saved_in(tmp_path, tokenizer_tokens=tokens, vocab_file="was.json")
    args = parse_args([])
    args.start = found
    for same in (Words("a", "b"), Words("a", "b", "new"), NullTokenizer(9)):
        check_tokens_kept(args, same)
    for other in (Words("b", "a"), Words("a"), Words("a", "c", "b")):
        with pytest.raises(DataError, match=r"--vocab-file was.json, .* those of now.json now"):
            check_tokens_kept(args, other)
    args.finetune = True
    check_tokens_kept(args, Words("b", "a"))
    args.finetune = False
    for unknown in (None, 3, "x"):  # of an earlier version, or a stranger's
        args.start = saved_in(tmp_path, tokenizer_tokens=unknown)
        check_tokens_kept(args, Words("b", "a"))


def test_a_broken_file_is_left_to_who_loads_it(tmp_path: Path) -> None:
    found = saved_in(tmp_path)
    (tmp_path / "common.pt").write_bytes(b"no archive")
    assert saved_args(found) is None


@pytest.mark.parametrize("name", MODEL)
def test_another_model_is_refused_by_both_values(name: str, tmp_path: Path) -> None:
    saved = saved_args(saved_in(tmp_path))
    args = argparse.Namespace(**RUN)
    check_model(args, saved, tmp_path)
    setattr(args, name, 5)
    with pytest.raises(DataError, match=f"{MODEL[name]}, this run has 5"):
        check_model(args, saved, tmp_path)


def test_other_slices_are_told_by_both_sizes(tmp_path: Path) -> None:
    there = {"use_dpp": True, "dpp_slice_tokens": "4096"}
    saved = saved_args(saved_in(tmp_path, **there))
    here = argparse.Namespace(**there)
    assert other_slices(here, saved, tmp_path) is None
    here.dpp_slice_tokens = "2048"
    said = f"{tmp_path} was saved with --dpp-slice-tokens 4096, this run has 2048: "
    assert str(other_slices(here, saved, tmp_path)).startswith(said)
    here.use_dpp = False
    assert "this run has off" in str(other_slices(here, saved, tmp_path))
    assert other_slices(here, argparse.Namespace(), tmp_path) is None


def test_settings_by_which_auto_may_choose_other_slices_are_told(tmp_path: Path) -> None:
    there = {
        "use_dpp": True, "dpp_slice_tokens": "auto", "pipeline_model_parallel_size": 2,
        "order": "drawn",
    }  # fmt: skip
    saved = saved_args(saved_in(tmp_path, **there))
    here = argparse.Namespace(**vars(saved))
    assert other_slices(here, saved, tmp_path) is None
    here.pipeline_model_parallel_size = 4
    said = f"{tmp_path} was saved with --pipeline-model-parallel-size 2: --dpp-slice-tokens auto "
    assert str(other_slices(here, saved, tmp_path)).startswith(said)
    here.dpp_slice_tokens = saved.dpp_slice_tokens = "2048"
    assert other_slices(here, saved, tmp_path) is None


def test_another_kind_of_optimizer_is_refused_unless_its_state_is_not_wanted(
    tmp_path: Path,
) -> None:
    saved = saved_args(saved_in(tmp_path, use_distributed_optimizer=True))
    with pytest.raises(ConfigError, match="add --no-load-optim"):
        check_optimizer(argparse.Namespace(**RUN), saved, tmp_path)
    check_optimizer(argparse.Namespace(**{**RUN, "no_load_optim": True}), saved, tmp_path)


@pytest.mark.parametrize("distributed", [False, True])
def test_another_kind_of_optimizer_is_refused_in_torch_files_too(
    distributed: bool, tmp_path: Path
) -> None:
    folder = files.begin(tmp_path, 3) / "mp_rank_00"
    folder.mkdir()
    saved = argparse.Namespace(**{**RUN, "use_distributed_optimizer": distributed})
    torch.save({"args": saved, "optimizer": {}}, folder / "model_optim_rng.pt")
    files.commit(tmp_path, 3)
    args = parse_args(["--load", str(tmp_path)])
    for name, value in RUN.items():
        setattr(args, name, value)
    args.use_distributed_optimizer = distributed
    check_start(args)
    args.use_distributed_optimizer = not distributed
    with pytest.raises(ConfigError, match=r"iter_0000003 was saved with.*--no-load-optim"):
        check_start(args)


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (4, 1), (1, 1), (2, 2), (4, 2)])
def test_the_state_of_experts_is_apart_above_one_rank_of_them(
    there: int, here: int, tmp_path: Path
) -> None:
    saved = argparse.Namespace(**{**RUN, "expert_model_parallel_size": there})
    args = argparse.Namespace(**{**RUN, "expert_model_parallel_size": here})
    if (there > 1) == (here > 1):
        check_optimizer(args, saved, tmp_path)
        return
    text = f"saved with --expert-model-parallel-size {there}, this run has {here}: above 1"
    with pytest.raises(ConfigError, match=text):
        check_optimizer(args, saved, tmp_path)
    for name in ("no_load_optim", "finetune", "skip_train"):
        check_optimizer(argparse.Namespace(**{**vars(args), name: True}), saved, tmp_path)


def test_given_sizes_win_over_those_of_a_checkpoint_and_its_structure_over_flags(
    tmp_path: Path,
) -> None:
    """Values that are off or 0 in the checkpoint count; those that it does not know stay."""
    there = {"ffn_hidden_size": 99, "add_bias_linear": False, "hidden_dropout": 0.0}
    there |= {"num_experts": None, "swiglu": True}
    saved_in(files.begin(tmp_path, 3), **there)
    files.commit(tmp_path, 3)
    words = ["--load", str(tmp_path), "--num-layers", "6", "--hidden-dropout", "0.3"]
    plain = parse_args(words)
    before = dict(vars(plain))
    take_checkpoint_args(plain)
    assert vars(plain) == before, "not without --use-checkpoint-args"
    args = parse_args([*words, "--num-experts", "2", "--use-checkpoint-args"])
    assert args.add_bias_linear and not args.swiglu
    take_checkpoint_args(args)
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (6, 64, 99)
    assert (args.add_bias_linear, args.hidden_dropout, args.swiglu) == (False, 0.0, True)
    assert args.num_experts == 2 and args.tokenizer_type == MODEL["tokenizer_type"]
    args = parse_args(["--pretrained-checkpoint", str(tmp_path), "--use-checkpoint-args"])
    take_checkpoint_args(args)
    assert args.num_layers == 4


def test_arguments_of_a_checkpoint_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--use-checkpoint-args needs --load"):
        take_checkpoint_args(parse_args(["--use-checkpoint-args"]))
    args = parse_args(["--use-checkpoint-args", "--load", str(tmp_path)])
    with pytest.raises(DataError, match=r"no checkpoint there \(--use-checkpoint-args\)"):
        take_checkpoint_args(args)
    folder = files.begin(tmp_path, 3)
    (folder / "metadata.json").write_text("{}")
    torch.save({"state": 1}, folder / "common.pt")
    files.commit(tmp_path, 3)
    with pytest.raises(DataError, match=r"common\.pt: holds no arguments"):
        take_checkpoint_args(args)
    for file in folder.with_suffix("").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"iter_0000003/common\.pt: unreadable"):
        take_checkpoint_args(args)


def test_a_pretrained_model_may_be_of_another_run(tmp_path: Path) -> None:
    """Its parameters alone are loaded; another model, or kind of optimizer, is met then."""
    folder = files.begin(tmp_path, 3) / "mp_rank_00"
    folder.mkdir()
    saved = argparse.Namespace(**{**RUN, "use_distributed_optimizer": True})
    torch.save({"args": saved, "optimizer": {}}, folder / "model_optim_rng.pt")
    files.commit(tmp_path, 3)
    for flag, refused in (("--pretrained-checkpoint", False), ("--load", True)):
        args = parse_args([flag, str(tmp_path)])
        for name, value in RUN.items():
            setattr(args, name, value)
        if refused:
            with pytest.raises(ConfigError, match="use-distributed-optimizer"):
                check_start(args)
            args.finetune = True
        check_start(args)


def test_an_optimizer_of_an_unknown_kind_passes() -> None:
    saved = argparse.Namespace(**{k: v for k, v in RUN.items() if "optimizer" not in k})
    for distributed in (False, True):
        args = argparse.Namespace(**RUN | {"use_distributed_optimizer": distributed})
        check_optimizer(args, saved, Path("x"))


def test_the_ends_of_files_are_read_from_pytorchs_metadata(tmp_path: Path) -> None:
    stored = {MetadataIndex("weight"): _StorageInfo("a", 20, 10)}
    written = pickle.dumps(Metadata({}, storage_data=stored))
    for name, content in {"metadata.json": b"{}", "common.pt": b"x", ".metadata": written}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a").write_bytes(bytes(30))
    files.check_whole(Found(tmp_path, 3), tensor=1, pipeline=1)
    (tmp_path / "a").write_bytes(bytes(29))
    with pytest.raises(DataError, match="/a: 29 bytes, expected at least 30"):
        files.check_whole(Found(tmp_path, 3), tensor=1, pipeline=1)


def test_files_are_those_of_the_run_wherever_its_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the same names in the reader's directory are another run's."""
    for folder in ("there", "here"):
        (tmp_path / folder / "llama").mkdir(parents=True)
        for name in ("tokenizer.json", "own.jinja", "plain"):
            (tmp_path / folder / "llama" / name).touch()
    there = str(tmp_path / "there")
    given = {"tokenizer_model": "llama/tokenizer.json", "load_hf": "llama", "load": "gone"}
    given |= {"sft_tokenizer_prompt_format": "llama/own.jinja", "vocab_file": None}
    found = saved_in(tmp_path, **given, working_directory=there)
    monkeypatch.chdir(tmp_path / "here")
    read = vars(saved_args(found))
    assert read["tokenizer_model"] == f"{there}/llama/tokenizer.json"
    assert read["sft_tokenizer_prompt_format"] == f"{there}/llama/own.jinja"
    assert (read["load_hf"], read["vocab_file"]) == (f"{there}/llama", None)
    assert read["load"] == "gone", "as the run named it: the tree may have moved"

    plain = {"sft_tokenizer_prompt_format": "plain", "tokenizer_model": "/x"}
    found = saved_in(tmp_path, **plain, working_directory=f"{there}/llama")
    assert plain.items() <= vars(saved_args(found)).items()
    assert saved_args(saved_in(tmp_path, **given)).load_hf == "llama", "of an older checkpoint"
