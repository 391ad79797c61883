"""SmolLM3: Llama, some of whose layers have no rotary embedding."""

from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.families import parts
from megatron.dpp_train.hf.families.base import Config, Family


def _read(content: Config) -> dict[str, Any]:
    layers, every = content["num_hidden_layers"], content.get("no_rope_layer_interval", 4)
    rotated = content.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotated) != layers or not set(rotated) <= {0, 1}:
        raise DataError(f"no_rope_layers is {shown(rotated)}, expected a 0 or 1 for each layer")
    if all(rotated):
        return {}
    return {"no-rope-freq": f"[{','.join(str(1 - each) for each in rotated)}]"}


def _write(args: Any) -> Config:
    skipped = args.no_rope_freq or [0] * args.num_layers
    if isinstance(skipped, int):
        skipped = [int((layer + 1) % skipped == 0) for layer in range(args.num_layers)]
    return {"no_rope_layers": [1 - each for each in skipped]}


FAMILY = Family(
    name="smollm3",
    models="SmolLM3",
    class_name="SmolLM3ForCausalLM",
    fields=parts.FIELDS,
    rows=parts.LLAMA,
    flags=parts.FLAGS,
    only=parts.ONLY,
    usual=parts.USUAL
    | {"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    silent=("no_rope_layers", "no_rope_layer_interval"),
    read=_read,
    write=_write,
)
