"""FlashAttention, exact attention in tiles: read `reference.py`, in plain PyTorch, first.

For any GPU: the kernels in `triton_kernels.py`, launched by `triton_attention.py`. For Hopper GPUs:
`hopper/`. In CUDA C++, as a T4 needs them: `cuda/`. `inputs.py` checks what all of them are given,
`operator.py` makes PyTorch operators of them, `tiles.py` knows which tiles are fast on which GPU.
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
