"""Files of settings: read, merged with the command line, and saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.options import settings
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.text_files import read_text
from tests.options.test_arguments import checked


def test_saved_settings_start_the_same_run_again(tmp_path: Path) -> None:
    args = checked(
        "--bf16 --lr-decay-style cosine --no-bias-gelu-fusion --attention-backend local "
        "--window-size 8,0 --no-rope-freq ([0]*3+[1])*2"
    )
    args = args.with_(padded_vocab_size=128)
    path = settings.save(args, tmp_path / "deep")
    again = parse_args(["--yaml-cfg", str(path)])
    assert {k: v for k, v in again.parsed.items() if k not in ("given", "yaml_cfg")} == {
        k: v for k, v in args.parsed.items() if k not in ("given", "yaml_cfg")
    }
    assert '# params_dtype: "torch.bfloat16"' in path.read_text()
    said = settings.summary(args, "gpt")
    assert len(said.splitlines()) == 3
    assert "8 layers of 64" in said


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        (2, "", "static schedule"),
        (2, "--use-dpp", "dynamic pipeline, policy megatron"),
        (4, "--use-dpp", "dynamic pipeline, policy dynamic"),
        (2, "--use-dpp --dpp-policy breadth-first", "dynamic pipeline, policy breadth-first"),
        (2, "--use-dpp --dpp-replay tape", "dynamic pipeline, order of --dpp-replay tape"),
    ],
)
def test_the_summary_names_the_order_that_runs(ranks: int, flags: str, said: str) -> None:
    args = checked(f"--pipeline-model-parallel-size {ranks} {flags}", world_size=ranks)
    layout = settings.summary(args.with_(padded_vocab_size=128), "gpt").splitlines()[1]
    assert layout.endswith(f"; {said}")


def test_two_spellings_of_a_setting_with_unlike_values_are_refused(tmp_path: Path) -> None:
    """The last one won in silence."""
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  num_layers: 2\nnum-layers: 2\n")
    assert parse_args(["--yaml-cfg", str(path)]).num_layers == 2
    path.write_text("model:\n  num_layers: 2\nnum-layers: 4\n")
    with pytest.raises(ConfigError, match="num_layers and num-layers set the same to 2 and 4"):
        parse_args(["--yaml-cfg", str(path)])


def test_yaml_settings_lie_between_defaults_and_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "language_model:\n  init_method_std: 0.5\n  attention_backend: local\n"
        "no-bias-gelu-fusion: true\nlr: 0.25\nadam-beta1: 0.5\n"
    )
    args = checked(f"--yaml-cfg {path}")
    assert (args.init_method_std, args.adam_beta1, args.lr) == (0.5, 0.5, 1e-3)
    assert args.attention_backend.name == "local"
    assert not args.bias_gelu_fusion
    plain = parse_args([])
    assert (plain.init_method_std, plain.bias_gelu_fusion) == (0.02, True), "the next has its own"
    path.write_text("dpp_split_backward: off\ndpp-cuda-graphs: on\n")
    words = checked(f"--yaml-cfg {path}")
    assert (words.dpp_split_backward, words.dpp_cuda_graphs) == ("off", "on"), "no booleans"
    path.write_text("language_model:\n  hiden_size: 3\n")
    with pytest.raises(ConfigError, match="did you mean hidden"):
        checked(f"--yaml-cfg {path}")
    path.write_text("- 3\n")
    with pytest.raises(DataError, match="expected a mapping"):
        checked(f"--yaml-cfg {path}")


def test_files_of_settings_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"lr: 1\n# \xe9t\xe9\n")
    with pytest.raises(DataError, match=r"--yaml-cfg .*latin: not UTF-8 text \(invalid"):
        parse_args(["--yaml-cfg", str(path)])
    with pytest.raises(DataError, match=r"latin: not UTF-8 text \(invalid"):
        read_text(str(path))


@pytest.mark.parametrize(
    ("lines", "without", "flags", "said"),
    [
        ("model_parallel:\n  global_batch_size: 7\n", "", "",
         "--global-batch-size is global_batch_size"),
        ("micro-batch-size: 0\n", "--micro-batch-size", "",
         "--micro-batch-size is micro-batch-size"),
        ("lr: -1\n", "--lr", "", "--lr is lr"),
        ("global_batch_size: 8\n", "", "--global-batch-size 7", None),
        ("lr: -1\nweight_decay: 0.5\n", "", "--global-batch-size 7", None),
    ],
)  # fmt: skip
def test_bad_values_of_a_file_are_named_by_its_keys(
    lines: str, without: str, flags: str, said: str | None, tmp_path: Path
) -> None:
    """Those of the command line, which win, are named by their flags alone."""
    path = tmp_path / "run.yaml"
    path.write_text(lines)
    with pytest.raises(ConfigError) as error:
        checked(f"{flags} --yaml-cfg {path}", 2, without)
    text = str(error.value)
    assert text.endswith(f" ({said} in {path})") if said else f"{path}" not in text
