"""The ``train`` command at the root: a few words in, Megatron's flags and one torchrun out.

``cli.py`` reads the command line, ``resolve.py`` makes flags of it, ``auto.py`` chooses a layout,
``start.py`` prepares data and hands over to ``examples/launch.sh``. No training happens here.
"""
