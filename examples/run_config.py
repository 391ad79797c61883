"""Trains a small GPT from Python: ``python examples/run_config.py``, two processes on the CPU."""

from megatron.dpp_train import RunConfig, run

config = RunConfig(
    num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=64, max_position_embeddings=64,
    micro_batch_size=1, global_batch_size=8, train_iters=10, lr=1e-3, eval_iters=0, log_interval=5,
    mock_data=True, tokenizer_type="NullTokenizer", vocab_size=255, transformer_impl="local",
    device="cpu", pipeline_model_parallel_size=2, use_dpp=True,
)  # fmt: skip
print("metrics:", run(config, processes=2) / "metrics.jsonl")
