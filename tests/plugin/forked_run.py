"""``python -m megatron.dpp.run`` in a forked rank that has imported PyTorch already.

forked_run.py JSON SCRIPT ...: JSON has further variables; PYTHONPATH is put onto the module path,
as Python itself does when it starts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys

os.environ |= json.loads(sys.argv.pop(1))
sys.path[:1] = ["", *os.environ["PYTHONPATH"].split(os.pathsep)]
sys.modules.pop("sitecustomize", None)
with contextlib.suppress(ImportError):
    importlib.import_module("sitecustomize")
runpy.run_module("megatron.dpp.run", run_name="__main__", alter_sys=True)
