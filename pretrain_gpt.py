"""Pre-train GPT with megatron-core's models, its static pipeline or (``--use-dpp``) a dynamic one.

Started by torchrun with Megatron-LM's flags; see docs/training.md.
"""

import sys

try:
    from megatron.dpp.processes import begin_program
    from megatron.dpp_train.loop.pretrain import main
except KeyboardInterrupt:  # Ctrl-C at any time is no traceback
    sys.exit(130)

if __name__ == "__main__":
    begin_program()
    sys.exit(main("gpt"))
