"""A short name for `lib.flash_attention.triton_attention`."""

from lib.flash_attention.triton_attention import FlashAttentionTriton, flash_attention

__all__ = ["FlashAttentionTriton", "flash_attention"]
