"""FlashAttention-2 in CUDA C++ with tensor cores, for a T4 and every later NVIDIA GPU.

Read `instructions.cuh` (which lane holds which number), `tiles.cuh` (shared memory, matmuls) and
`forward.cu`, and then `launch.py`, `build.py` and `driver.py`, which bring them to the GPU.
`hopper_backward.cu`, with the instructions of `hopper.cuh`, is for Hopper GPUs alone, and launched
by `lib.flash_attention.hopper.fused`.
"""
