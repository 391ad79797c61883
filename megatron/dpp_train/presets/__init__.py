"""``megatron-dpp train`` and the launch scripts: from a few settings to one torchrun per node.

Nothing here imports PyTorch: a wrong command line is answered in less than a second.
"""
