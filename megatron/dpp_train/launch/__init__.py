"""The ``train`` command and the launch scripts: options in, Megatron's flags and one torchrun out.

``main.py`` is the command. ``cli.py`` reads its options, ``resolve.py`` makes flags of them,
``auto.py`` chooses a layout, ``start.py`` prepares data. The launch scripts are presets of it:
``scripts.py`` reads their variables. ``program.py`` is for Python programs. All end in ``job.py``,
which starts torchrun. No training happens here.
"""
