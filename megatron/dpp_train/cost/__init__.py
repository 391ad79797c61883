"""One cost model of a run: FLOPs, bytes, times and memory, and the layout planner on top of it.

Pure Python, no PyTorch. ``shape.py`` holds the data types, ``constants.py`` the fitted figures,
``memory.py`` and ``times.py`` the formulas. ``estimate.py`` and ``planner.py`` combine them with
the simulator.
"""
