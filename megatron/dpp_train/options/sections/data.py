"""A section of the settings, which ``cli.write_sections`` writes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp_train.options.section import UNSET, Section


class Data(Section):
    """Data sets, tokenizer, loaders, evaluation, sequences of unlike length."""

    data_path: Sequence[str] | None = None
    train_data_path: Sequence[str] | None = None
    valid_data_path: Sequence[str] | None = None
    test_data_path: Sequence[str] | None = None
    data_args_path: str | None = None
    per_split_data_args_path: str | None = None
    split: str | None = None
    mock_data: bool = False
    seq_length: int = UNSET
    encoder_seq_length: int = UNSET
    decoder_seq_length: int | None = None
    data_cache_path: str | None = None
    mmap_bin_files: bool = True
    num_workers: int = 2
    dataloader_type: str = UNSET
    data_sharding: bool = True
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask_in_dataloader: bool = True
    dataloader_fast_cache_load: bool = False
    dataloader_defer_npy_index_mmap: bool = False
    per_dataset_sequences_path: str | None = None
    num_dataset_builder_threads: int = 1
    mask_prob: float = 0.15
    masking_max_ngram: int = 3
    masking_do_full_word: bool = True
    masking_do_permutation: bool = False
    masking_use_longer_ngrams: bool = False
    masking_use_geometric_distribution: bool = False
    short_seq_prob: float = 0.1
    tokenizer_type: str = UNSET
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    padded_vocab_size: int = UNSET
    vocab_extra_ids: int = 0
    legacy_tokenizer: bool = False
    eval_iters: int = 100
    eval_interval: int | None = None
    skip_train: bool = False
    full_validation: bool = False
    sft: bool = False
    sft_tokenizer_prompt_format: str = "auto"
    variable_length: bool = False
    overlong: str = "error"
    packing: str = "none"
    packing_budget: int = UNSET
    length_costs: str | None = None
    order: str = "drawn"
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool = False
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    object_storage_cache_path: str | None = None
    variable_lengths: bool = False
    variable_seq_lengths: bool = False
    loss_vocab_size: int | None = None
    length_multiple: int = 1
    length_buckets: tuple[int, ...] = ()
    slice_tokens: int | None = None
    holds_whole: bool = True
