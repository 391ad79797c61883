"""The result of a conversion appears whole or not at all, also where the disk fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf.to_megatron import unfinished
from tests.failing_disk import Disk


def _convert(target: Path) -> None:
    with unfinished(target) as new:
        (new / "release").mkdir()
        (new / "release" / "common.pt").write_text("whole")
        (new / "tracker").write_text("release")


@pytest.mark.parametrize("lasts", [False, True])
def test_whichever_call_fails_a_result_is_whole_and_the_next_attempt_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lasts: bool
) -> None:
    disk, number, failed = Disk(monkeypatch, tmp_path), 0, 0
    while True:
        target = tmp_path / str(number) / "result"
        disk.fail_at(number, lasts=lasts)
        try:
            _convert(target)
        except (DataError, OSError) as error:
            failed += 1
            assert isinstance(error, DataError), (disk.calls[number], error)
            assert f"{number}/.result.unfinished" in str(error) or str(target) in str(error)
        calls = len(disk.calls)
        disk.heal()
        if target.exists():
            assert (target / "tracker").exists()
        else:
            _convert(target)
        assert (target / "release" / "common.pt").read_text() == "whole"
        if number >= calls:
            break
        number += 1
    assert failed > 5
    assert [each.name for each in target.parent.iterdir()] == ["result"]
