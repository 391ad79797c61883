"""The shared memory that a test leaves behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

_FOLDER = "/dev/shm"
_PATIENCE = 30.0


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Fails if an entry of ``/dev/shm`` that was made within the block stays after it.

    Other processes make entries too. Theirs go again; the block's own had no other reason to stay.
    """
    before = set(os.listdir(_FOLDER))
    yield
    left, deadline = set(os.listdir(_FOLDER)) - before, time.monotonic() + _PATIENCE
    while left:
        assert time.monotonic() < deadline, f"left in {_FOLDER}: {', '.join(sorted(left))}"
        time.sleep(0.05)
        left &= set(os.listdir(_FOLDER))
