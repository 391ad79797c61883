"""Answers to prompts and losses of files, by a model in one process."""

import warnings

warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed")
