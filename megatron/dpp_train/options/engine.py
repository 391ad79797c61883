"""Looks for Transformer Engine in a Python; as a program, in its own, which may lack packages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def has_engine(python: str = sys.executable) -> bool:
    """True if a Python has Transformer Engine with its extension for PyTorch.

    Args:
        python: its executable; one that does not run has none.
    """
    if python == sys.executable:
        return _is_here()
    try:
        done = subprocess.run([python, __file__], capture_output=True, text=True)
    except OSError:
        return False
    return done.stdout.strip() == str(True)


def _is_here() -> bool:
    found = importlib.util.find_spec("transformer_engine")
    for place in (found and found.submodule_search_locations) or ():
        own = Path(place)
        for folder in (own.parent, own, own / "wheel_lib"):
            if next(folder.glob("transformer_engine_torch*.so"), None):
                return True
    return False


if __name__ == "__main__":
    print(_is_here())
