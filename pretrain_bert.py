"""Trains BERT with Megatron's own loop; ``--use-dpp`` runs its steps in the dynamic pipeline.

torchrun starts it with Megatron-LM's flags; see docs/training.md.
"""

import sys

try:
    from megatron.dpp.errors import exit_with
    from megatron.dpp.processes import begin_program
    from megatron.dpp_train.pretrain import main
except KeyboardInterrupt:  # Ctrl-C at any time is no traceback
    sys.exit(130)

if __name__ == "__main__":
    begin_program()
    exit_with(lambda: main("bert"))
