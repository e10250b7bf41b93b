"""FlashAttention-2 in CUDA C++ with tensor cores, for a T4 and every later NVIDIA GPU.

Read `instructions.cuh` (which lane holds which number), `tiles.cuh` (shared memory, matmuls) and
`forward.cu`, and then `launch.py`, `build.py` and `driver.py`, which bring them to the GPU.
`hopper_forward.cu`, `hopper_backward.cu` and `hopper_backward_wide.cu`, with the instructions of
`hopper.cuh` and what `hopper_tiles.cuh` does with tiles, are for Hopper GPUs alone;
`lib.flash_attention.hopper.unpadded` and `fused` launch them. `hopper_backward.cuh` is what both
backward kernels have in common.
"""
