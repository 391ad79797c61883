"""Models that flags ask for, batches of a stage, and losses."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.data.sequences import Microbatch
from megatron.dpp_train.model import tasks
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.state import LossCheck
from tests.model.test_configs import settled

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --num-experts 4 "
    "--max-position-embeddings 8 --transformer-impl local --device cpu"
)


def parsed(*flags: str) -> Any:
    return parse_args([*FLAGS.split(), *flags])


def built(kind: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, Any]:
    """The arguments of the model's class, and those of its layers' specs."""
    given: dict[str, Any] = {"layers": []}

    def spec(*_: Any, **options: Any) -> Any:
        given["layers"].append(options)
        return SimpleNamespace(layer_specs=["layer"], layer_norm="norm")

    monkeypatch.setattr(tasks, "block_spec", spec)
    monkeypatch.setattr(
        tasks, "prediction_spec", lambda *_, **options: spec(**options) and "further"
    )
    for name in ("GPTModel", "BertModel"):
        monkeypatch.setattr(tasks, name, lambda **options: given.update(options))
    args = parsed(*flags)
    build = tasks.build_gpt if kind == "gpt" else tasks.build_bert
    build(args, None, vp_stage=1, pre_process=True, post_process=False)  # type: ignore[arg-type]
    return given


def test_positions_and_embeddings_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 77 --use-rope-scaling "
        "--rope-scaling-factor 3 --untie-embeddings-and-output-weights"
    )
    given = built("gpt", monkeypatch, *flags.split())
    expected = {
        "position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 77,
        "rope_scaling": True, "rope_scaling_factor": 3.0, "max_sequence_length": 8,
        "share_embeddings_and_output_weights": False, "mtp_block_spec": "further", "vp_stage": 1,
        "pre_process": True, "post_process": False, "parallel_output": True,
    }  # fmt: skip
    assert {name: given[name] for name in expected} == expected
    assert built("gpt", monkeypatch)["share_embeddings_and_output_weights"] is True


@pytest.mark.parametrize("half", [False, True])
def test_the_cross_entropy_is_computed_in_half_precision_if_asked(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = built("gpt", monkeypatch, *["--fp16-lm-cross-entropy"] * half)
    assert given["fp16_lm_cross_entropy"] is half


@pytest.mark.parametrize("with_head", [True, False])
def test_berts_second_head_has_sentence_types(
    with_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = built("bert", monkeypatch, *([] if with_head else ["--bert-no-binary-head"]))
    assert given["add_binary_head"] is with_head
    assert given["num_tokentypes"] == (2 if with_head else 0)
    assert given["vp_stage"] == 1, "the number of the chunk"


@pytest.mark.parametrize(
    ("implementation", "device", "expected"),
    [("local", "cpu", "megatron"), ("local", "cuda", "torch"),
     ("transformer_engine", "cpu", "transformer_engine")],
)  # fmt: skip
def test_local_layers_are_megatrons_on_a_cpu_alone(
    implementation: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--transformer-impl", implementation, "--device", device)
    for kind, count in (("gpt", 2), ("bert", 1)):
        asked = [each["implementation"] for each in built(kind, monkeypatch, *flags)["layers"]]
        assert asked == [expected] * count


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--moe-grouped-gemm", "grouped_experts"), ("--reset-attention-mask", "own_masks")],
)
def test_all_layers_are_asked_for_grouped_products_and_the_masks_of_documents(
    flag: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that make a causal mask by themselves would let documents see each other."""
    for flags in ([], [flag]):
        asked = [each[name] for each in built("gpt", monkeypatch, *flags)["layers"]]
        assert asked == [bool(flags)] * 2


INPUTS, LABELS = {"tokens", "position_ids"}, {"labels", "loss_mask"}


@pytest.mark.parametrize("further", [None, 1])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_stage_reads_what_it_computes_with(
    first: bool, last: bool, further: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction of further tokens needs the inputs on the last stage as well."""
    layout: dict[str, Any] = {}
    monkeypatch.setattr(tasks, "ends", lambda stage: (first, last))
    monkeypatch.setattr(
        tasks, "tensor_parallel_batch", lambda sample, asked, device: layout.update(asked) or {}
    )
    monkeypatch.setattr(tasks, "get_batch_on_this_cp_rank", lambda batch: batch)
    microbatch = Microbatch((8, 7), (2, 8), 1.0, None)
    run = _run(mtp_num_layers=further, variable_lengths=True, calculate_per_token_loss=True)
    tasks.TASKS["gpt"].get_batch(run, iter([microbatch]), None)
    inputs = INPUTS if (first or further) and (first or last) else set()
    assert set(layout) == inputs | (LABELS if last else set())
    assert all(shape == (2, 8) for shape, _ in layout.values())
    assert all(
        dtype == (torch.float32 if name == "loss_mask" else torch.int64)
        for name, (_, dtype) in layout.items()
    )


def _run(**changes: Any) -> Any:
    args = {"packing": "none", "micro_batch_size": 1, "context_parallel_size": 1,
            "calculate_per_token_loss": False, "mtp_num_layers": None, "seq_length": 4,
            "create_attention_mask_in_dataloader": False, "variable_lengths": False,
            "check_for_nan_in_loss_and_grad": True, "bert_binary_head": True}  # fmt: skip
    return SimpleNamespace(
        args=argparse.Namespace(**args | changes), device=torch.device("cpu"), iteration=0, rank=0,
        loss_check=LossCheck(),
    )  # fmt: skip


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor-parallel rank that reads itself, and a context rank with the first half of a row."""
    monkeypatch.setattr(
        tasks,
        "tensor_parallel_batch",
        lambda sample, layout, device: {n: sample[n] for n in layout},
    )
    monkeypatch.setattr(
        tasks,
        "get_batch_on_this_cp_rank",
        lambda b: {n: t[:, : t.shape[1] // 2] for n, t in b.items()},
    )


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, None),
        ({"micro_batch_size": 2}, 0.5),
        ({"packing": "even"}, 0.5),
        ({"context_parallel_size": 2}, 1.0),
        ({"packing": "even", "context_parallel_size": 4}, 2.0),
        ({"packing": "even", "calculate_per_token_loss": True}, None),
        ({"context_parallel_size": 2, "calculate_per_token_loss": True}, None),
    ],
)
def test_sequences_weigh_the_same_wherever_they_are(
    changes: dict[str, Any], factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the microbatch's share, and by the ranks over which megatron-core takes the mean."""
    names = ("tokens", "position_ids", "labels", "loss_mask", "loss_weights")
    sample = {name: torch.ones(1, 8) for name in names}
    microbatch = Microbatch((3, 4), (1, 8), 0.5, sample)
    run = _run(variable_lengths=True, **changes)

    def of_stage(*, first: bool, last: bool) -> Any:
        monkeypatch.setattr(tasks, "ends", lambda stage: (first, last))
        return tasks.TASKS["gpt"].get_batch(run, iter([microbatch]), None)

    batch = of_stage(first=False, last=True)
    expected = None if factor is None else [[factor] * 4]
    assert (batch["loss_weights"].tolist() if "loss_weights" in batch else None) == expected
    assert batch["labels"].shape == (1, 4) and "tokens" not in batch
    packed = "packing" in changes
    for stage in (batch, of_stage(first=False, last=False)):
        assert ("cu_seqlens" in stage) is packed
    first = of_stage(first=True, last=False)
    assert "loss_weights" not in first and "tokens" in first


@pytest.mark.usefixtures("half")
def test_context_ranks_take_their_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = {name: torch.arange(4)[None] for name in (*INPUTS, *LABELS)}
    monkeypatch.setattr(tasks, "ends", lambda stage: (True, True))
    batch = tasks.TASKS["gpt"].get_batch(_run(), iter([sample]), None)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        name: [[0, 1]] for name in (*INPUTS, *LABELS)
    }


def test_a_weighted_loss_counts_as_one_and_is_reported_by_tokens() -> None:
    output, mask = torch.tensor([[1.0, 3.0, 5.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    weights = torch.tensor([[0.5, 0.25, 0.0]])
    loss, count, report = tasks.gpt_loss(_run(), mask, output, weights=weights)
    assert (loss.item(), count.item()) == (1.25, 1)
    assert report["lm loss"].tolist() == [4.0, 2.0]


def test_berts_loss_is_that_of_both_heads_without_unknown_orders() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [9.0, 9.0]], requires_grad=True)
    tokens, mask = torch.tensor([[1.0, 3.0]] * 3), torch.tensor([[1.0, 0.0]] * 3)
    order = torch.tensor([0, 1, -1])
    loss, report = tasks.bert_loss(_run(), mask, order, (tokens, logits))
    expected = torch.nn.functional.cross_entropy(logits[:2], order[:2])
    assert loss.item() == pytest.approx(1.0 + expected.item())
    assert report["lm loss"].item() == 1.0
    assert report["sop loss"].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("with_head", [True, False])
def test_bert_tells_sentences_apart_for_its_second_head(with_head: bool) -> None:
    given: dict[str, Any] = {}

    def model(*words: Any, **options: Any) -> None:
        given.update(options, words=words)

    names = ("text", "padding_mask", "types", "labels", "loss_mask", "is_random")
    run = _run(bert_binary_head=with_head)
    tasks.TASKS["bert"].forward(run, model, {name: name for name in names})
    assert given == {
        "words": ("text", "padding_mask"), "lm_labels": "labels",
        "tokentype_ids": "types" if with_head else None,
    }  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
def test_gpt_is_given_its_whole_batch(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction of further tokens masks its losses by itself."""
    monkeypatch.setattr(tasks, "packed_params", lambda *given: given)
    given: dict[str, Any] = {}

    def model(*words: Any, **options: Any) -> str:
        given.update(options, words=words)
        return "output"

    names = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    names += ("cu_seqlens", "max_seqlen") * packed
    run = _run()
    output, loss = tasks.TASKS["gpt"].forward(run, model, {name: name for name in names})
    assert given == {
        "words": ("tokens", "position_ids", "attention_mask"), "labels": "labels",
        "loss_mask": "loss_mask",
        "packed_seq_params": ("cu_seqlens", "max_seqlen") if packed else None,
    }  # fmt: skip
    assert output == "output" and loss.args == (run, "loss_mask")  # type: ignore[attr-defined]


def test_stages_in_the_middle_read_the_masks_of_berts_layers() -> None:
    reading = {name: task.every_stage_reads for name, task in tasks.TASKS.items()}
    assert reading == {"gpt": False, "bert": True}


DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.mark.parametrize("given", [None, *DOCUMENTS])
def test_documents_of_a_sample_are_told_apart_as_the_flags_say(given: str | None) -> None:
    flags = "" if given is None else f"--{given.replace('_', '-')}"
    run: Any = SimpleNamespace(args=settled(flags), tokenizer=SimpleNamespace(vocab_size=100))
    kind, config = tasks.gpt_datasets(run)
    assert kind is tasks.MockGPTDataset
    assert [name for name in DOCUMENTS if getattr(config, name)] == [given] * (given is not None)


@pytest.mark.parametrize("masked", [True, False])
def test_the_end_of_a_document_has_a_loss_unless_it_is_masked(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "dataset_values", lambda args, tokenizer: {})
    monkeypatch.setattr(tasks, "SequenceConfig", argparse.Namespace)
    run = _run(
        variable_lengths=True, eod_mask_loss=masked, sft=True, overlong="cut",
        per_dataset_sequences_path=None, reset_position_ids=False, reset_attention_mask=False,
        object_storage_cache_path=None, data_parallel_size=2, tensor_model_parallel_size=4,
        sequence_parallel=False,
    )  # fmt: skip
    run.tokenizer = SimpleNamespace(eod=99)
    kind, config = tasks.gpt_datasets(run)
    assert kind is tasks.SequenceDataset
    assert config.end_of_document == (99 if masked else None)  # type: ignore[attr-defined]
    assert config.chats is True and config.sequence_parallel_size == 0  # type: ignore[attr-defined]
