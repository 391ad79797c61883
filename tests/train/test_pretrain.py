"""The training scripts on Megatron's loop: its own numbers, bit by bit in every schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import DataError
from tests.train.runs import MODEL, train, write_corpus

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="megatron-core has its training loop for Python 3.12 on"
)
DYNAMIC = "--use-dpp --dpp-strict"
LAYOUTS = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2-pp2-chunks": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "pp2-dp2": (
        4,
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    "experts": (
        4,
        "--pipeline-model-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear",
    ),
    "mtp": (
        2,
        "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --position-embedding-type rope "
        "--no-rope-fusion",
    ),
    "cp2": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
}
LONG = ("pp2", "pp2-dp2", "experts", "mtp", "cp2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder / "text", [7 + 11 * number % 40 for number in range(400)])


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in LAYOUTS],
)
def test_dynamic_is_static_bit_by_bit(layout: str, corpus: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    static = train(tmp_path, ranks, MODEL, corpus, flags)
    dynamic = train(tmp_path, ranks, MODEL, corpus, flags, DYNAMIC)
    assert len(static.numbers) == 5  # three steps, validation and test
    assert dynamic.numbers == static.numbers


def test_a_run_is_saved_and_goes_on_in_another_layout(corpus: str, tmp_path: Path) -> None:
    _, flags = LAYOUTS["pp2"]
    save = f"--save {tmp_path / 'saved'} --save-interval 2 --ckpt-format torch_dist"
    whole = train(tmp_path, 2, MODEL, corpus, flags, DYNAMIC, save)
    load = f"--load {tmp_path / 'saved'} --ckpt-step 2"
    rest = train(tmp_path, 1, MODEL, corpus, load)
    assert rest.column("iteration") == [3, 3, 3]
    for name in ("loss", "validation_loss", "test_loss"):
        assert rest.column(name) == pytest.approx(whole.column(name)[-1:], abs=1e-5)
    again = train(tmp_path, 2, MODEL, corpus, flags, DYNAMIC, load)
    assert again.numbers == whole.numbers[-3:]
    other = train(tmp_path, 1, MODEL, corpus, load, "--lr 1e-3 --override-opt-param-scheduler")
    assert other.column("lr") == [1e-3]


def test_a_split_without_documents_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core never ended to count the epochs of 120 documents' thousandth."""
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

    from megatron.dpp_train.pretrain.mended import no_empty_split

    monkeypatch.setenv("RANK", "0")
    prefix = write_corpus(tmp_path / "few", [40] * 120).split()[1]
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1, sequence_length=32, blend=([prefix], None), split="949,50,1",
        tokenizer=SimpleNamespace(eod=0, vocab_size=127, unique_identifiers={}),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        path_to_cache=str(tmp_path / "cache"),
    )  # fmt: skip
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, [12, 8, 8], lambda: True, config
    )
    with no_empty_split(), pytest.raises(DataError, match="949,50,1: leaves no document for test"):
        builder.build()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("step", "why"), [("2", "Weights only load failed"), ("2x", "invalid literal for int")]
)
def test_a_broken_checkpoint_ends_no_run_well(step: str, why: str, tmp_path: Path) -> None:
    """megatron-core prints why and ends with status 0, and the run was said to have finished."""
    from megatron.training import checkpointing

    from megatron.dpp_train.pretrain.mended import mended

    tracker, model = "latest_checkpointed_iteration.txt", "iter_0000002/mp_rank_00"
    (tmp_path / model).mkdir(parents=True)
    (tmp_path / tracker).write_text(step)
    (tmp_path / model / "model_optim_rng.pt").write_bytes(b"PK")
    args = SimpleNamespace(
        load=str(tmp_path), ckpt_step=None, non_persistent_global_ckpt_dir=None,
        non_persistent_ckpt_type=None, exit_on_missing_checkpoint=False, ckpt_format="torch",
    )  # fmt: skip
    with mended(), pytest.raises(DataError, match=f"cannot be loaded: {why}"):
        checkpointing.load_args_from_checkpoint(args)
