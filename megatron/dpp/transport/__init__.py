"""Moving tensors between pipeline ranks: channels, and the kinds that carry them."""
