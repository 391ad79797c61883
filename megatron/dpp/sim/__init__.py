"""The simulator: a virtual clock that drives the same Scheduler as training does.

It serves to choose settings before a run, to explain a run, and to test ``schedule``. Read
``clock.py`` first, then ``costs.py`` (its input) and ``conditions.py`` (variation). Pure Python.
Its command line is ``megatron-dpp sim``.
"""
