"""FlashAttention-2 in CUDA C++ with tensor cores, for a T4 and every later NVIDIA GPU.

Read `instructions.cuh` (which lane holds which number), `tiles.cuh` (shared memory, matmuls) and
`forward.cu`, and then `launch.py`, `build.py` and `driver.py`, which bring them to the GPU.
"""
