"""Tests of the trainer on Megatron's own loop."""
