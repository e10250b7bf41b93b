"""FlashAttention for Hopper GPUs: `launch.py` chooses and starts the kernels.

In Gluon: `forward.py` and `backward.py`, from the parts in `blocks.py`. In CUDA C++, where that is
faster: `unpadded.py` (forward) and `fused.py` (backward), whose sources are in `../cuda/`.
"""
