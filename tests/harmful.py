"""An object whose unpickling runs code, for tests of files that may come from anyone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Harmful:
    """Would make the directory ``path`` when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)
