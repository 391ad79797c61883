"""The ``train`` command and the launch scripts: options in, Megatron's flags and one torchrun out.

``door.py`` refuses directories of other runs before anything else. ``cli.py`` reads ``train``'s
command line, ``resolve.py`` makes flags of it, ``auto.py`` chooses a layout, ``start.py`` prepares
data. ``scripts.py`` reads the launch scripts' variables. Both end in ``job.py``, which starts
torchrun. No training happens here.
"""
