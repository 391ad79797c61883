"""Answers to prompts and losses of files, by a model in one process."""

import warnings

warnings.filterwarnings("ignore", ".*Apex (is|are) not installed")
