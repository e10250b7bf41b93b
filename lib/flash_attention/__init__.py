"""FlashAttention, exact attention in tiles: read `reference.py`, in plain PyTorch, first.

`triton_attention.py` launches the kernels for any GPU, which are in `triton_kernels.py`;
`hopper/launch.py` those for Hopper GPUs, `cuda/launch.py` those in CUDA C++, which a T4 needs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "reference": ["FlashAttention"],
        "cuda.attention": ["FlashAttentionCUDA"],
        "triton_attention": ["FlashAttentionTriton", "flash_attention"],
    },
)
