"""A rule that holds for all tests."""

from __future__ import annotations

import os

import pytest
import torch

from tests import conftest


def test_a_test_that_is_not_marked_for_gpus_sees_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine with GPUs such tests took one, and failed."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(conftest, "has_gpu", lambda: True)
    with conftest.without_gpus():
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
