"""The trainer of MegatronDPP: Megatron's own loop, presets, data sets, Hugging Face models."""
