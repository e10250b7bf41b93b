"""Keys and values of tokens that a model has seen, so that it need not compute them again."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.config_training import ModelConfig


class KVCache:
    """Room for the keys and values of `context_length` tokens in every layer.

    Takes 2 · layers · batch · context_length · d_model elements.

    Attributes:
        length: tokens held so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (config.num_layers, batch_size, config.num_heads, config.context_length)
        self.keys = torch.zeros(*shape, config.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add k and v, (batch, heads, new, head_dim), of the tokens from `length` on.

        `length` itself is moved by the model, once all layers have added theirs.

        Returns:
            All keys, all values (batch, heads, length + new, head_dim), and which of them each new
            token sees, (new, length + new) bool.

        Raises:
            ValueError: k is of another number of sequences than the cache.
        """
        batch_size = self.keys.shape[1]
        if len(k) != batch_size:
            raise ValueError(f"k has {len(k)} sequences; right is: the cache's {batch_size}")
        end = self.length + k.shape[-2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        places = torch.arange(end, device=k.device)
        mask = places[None, :] <= places[self.length :, None]
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end], mask
