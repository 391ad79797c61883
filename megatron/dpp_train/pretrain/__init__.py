"""Training scripts on Megatron's own loop: ``gpt.py`` and ``bert.py``."""
