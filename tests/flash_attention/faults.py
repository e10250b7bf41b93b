"""Deliberate faults in this room; `tests/test_faults.py` shows that the tests catch them all."""

from tests.fault import Fault

REFERENCE = "lib/flash_attention/reference.py"
FORWARD = "lib/flash_attention/hopper/forward.py"
BACKWARD = "lib/flash_attention/hopper/backward.py"
DIRECT = "lib/flash_attention/hopper/direct.py"
BLOCKS = "lib/flash_attention/hopper/blocks.py"
LAUNCH = "lib/flash_attention/hopper/launch.py"
TEST_REFERENCE = "tests/flash_attention/test_reference.py"
TEST_SIMULATED = "tests/flash_attention/test_hopper_simulated.py"
TEST_LAUNCH = "tests/flash_attention/test_hopper_launch.py"
TEST_DIRECT = "tests/flash_attention/test_hopper_direct.py"
CUDA = "lib/flash_attention/cuda/"
TEST_CUDA = "tests/flash_attention/cuda/test_kernels.py"
TEST_FORWARD = "tests/flash_attention/cuda/test_hopper_forward.py"
TEST_BACKWARD = "tests/flash_attention/cuda/test_hopper_backward.py"

FAULTS = [
    # the reference: a mask one off, sums not rescaled, a factor lost, tiles skipped
    Fault(REFERENCE, "key > query[:, None]", "key >= query[:, None]", TEST_REFERENCE),
    Fault(REFERENCE, "O = shrink * O + P @ V", "O = O + P @ V", TEST_REFERENCE),
    Fault(REFERENCE, "dK += scale * (dS.mT @ Q)", "dK += (dS.mT @ Q)", TEST_REFERENCE),
    Fault(
        REFERENCE,
        "start = columns.start // query_tile * query_tile if",
        "start = columns.stop // query_tile * query_tile if",
        TEST_REFERENCE,
    ),
    Fault(REFERENCE, "l.clamp(min=1)", "l", TEST_REFERENCE),
    # the portable kernels, in the interpreter
    Fault(
        "lib/flash_attention/triton_kernels.py",
        "lse = row_max * LN_2 + tl.log(row_sum)",
        "lse = row_max + tl.log(row_sum)",
        "tests/flash_attention/test_triton_attention.py",
    ),
    # inputs
    Fault(
        "lib/flash_attention/inputs.py",
        "x.stride(2) < 2**23",
        "x.stride(2) < 2**33",
        "tests/flash_attention/test_triton_attention.py -k token_stride",
    ),
    # the Hopper kernels, in the simulator: a wait lost, one off, a sign
    Fault(
        FORWARD,
        "mbarrier.wait(args.q_ring.empty.index(part), index & 1 ^ 1)",
        "mbarrier.wait(args.q_ring.empty.index(part), index & 1)",
        TEST_SIMULATED,
    ),
    Fault(BACKWARD, "p = gl.where(key <= query, p, 0.0)", "pass", TEST_SIMULATED),
    Fault(
        BLOCKS,
        "gl.join(even * cos + odd * sin, odd * cos - even * sin)",
        "gl.join(even * cos - odd * sin, odd * cos + even * sin)",
        TEST_SIMULATED,
    ),
    Fault(
        BACKWARD,
        "gl.store(args.minus_delta_ptr + padded_row, -delta)",
        "gl.store(args.minus_delta_ptr + padded_row, delta)",
        TEST_SIMULATED,
    ),
    Fault(
        BLOCKS,
        "last = gl.minimum(last, query)",
        "last = gl.minimum(last, query - 1)",
        TEST_SIMULATED,
    ),
    # launching: heads left out, a check skipped
    Fault(LAUNCH, "for s in starts for t in order", "for t in order for s in starts", TEST_LAUNCH),
    Fault(LAUNCH, "stride % 8 == 0 for", "stride % 4 == 0 for", TEST_LAUNCH),
    # compiling: what a call needs waits like what it does not, and the other way round
    Fault(
        LAUNCH,
        'is_spare = needs_even != arguments["CONFIG"].IS_EVEN',
        "is_spare = True",
        TEST_LAUNCH,
    ),
    Fault(
        "lib/flash_attention/background.py",
        "return not _running[False] and _running[True] < SPARE",
        "return True",
        "tests/flash_attention/test_background.py",
    ),
    # direct launches: another tensor's address, a map of the wrong place
    Fault(DIRECT, "            place += 8\n", "", TEST_DIRECT),
    Fault(DIRECT, "known(addresses[name])", "known(addresses[self.maps[0][1]])", TEST_DIRECT),
    # the last section of heads is taken for a whole one
    Fault(
        "lib/flash_attention/hopper/blocks.py",
        "heads = gl.minimum(sizes.section, num_heads - first_head)",
        "heads = sizes.section",
        "tests/flash_attention/test_hopper_launch.py",
    ),
    # every item is in the first section
    Fault(
        "lib/flash_attention/hopper/blocks.py",
        "first_head = item // (sizes.section * sizes.num_tiles) * sizes.section",
        "first_head = 0",
        "tests/flash_attention/test_hopper_launch.py",
    ),
    # the partial tile of queries comes last under a causal mask too
    Fault(
        "lib/flash_attention/hopper/blocks.py",
        "first -= (sizes.num_tiles * CONFIG.WARPGROUPS - row_tiles) * ROWS",
        "first -= 0",
        "tests/flash_attention/test_hopper_launch.py",
    ),
    # CUDA C++, emulated: a barrier lost, no swizzle, a mask one off, a sum not rescaled
    Fault(
        CUDA + "forward.cu",
        "copy.finish(v_tile);\n        __syncthreads();",
        "copy.finish(v_tile);",
        TEST_CUDA,
    ),
    Fault(
        CUDA + "tiles.cuh",
        "chunk / GROUP * GROUP + (chunk % GROUP ^ swizzle)",
        "chunk",
        TEST_CUDA + " -k twice_at_once",
    ),
    Fault(
        CUDA + "tiles.cuh", "        wait_for_copies();\n", "", TEST_CUDA + " -k without_registers"
    ),
    Fault(CUDA + "tiles.cuh", "key > query", "key >= query", TEST_CUDA),
    Fault(CUDA + "forward.cu", "sum[r] *= shrink;", "", TEST_CUDA),
    Fault(CUDA + "launch.py", "-(-delta.numel() // (2 *", "(delta.numel() // (2 *", TEST_CUDA),
    Fault(
        CUDA + "build.py",
        'hashlib.sha256(b"\\0".join([found, *(file.read_bytes() for file in files)]))',
        "hashlib.sha256(found)",
        "tests/flash_attention/cuda/test_build.py",
    ),
    Fault(
        CUDA + "build.py",
        "if hashlib.sha256(image).digest() == digest:",
        "if True:",
        "tests/flash_attention/cuda/test_build.py",
    ),
    # the forward kernel for Hopper in CUDA C++: a mask one off, sums not scaled, a tile too few
    Fault(
        CUDA + "hopper_forward.cu", "CAUSAL && key > query", "CAUSAL && key >= query", TEST_FORWARD
    ),
    Fault(CUDA + "hopper_forward.cu", "rows.sum[r] * shrink[r]", "rows.sum[r]", TEST_FORWARD),
    Fault(
        CUDA + "hopper_forward.cu",
        "if (max <= rows.max[r] + GROWTH) max = rows.max[r];",
        "max = rows.max[r] < 0 ? max : rows.max[r];",
        TEST_FORWARD,
    ),
    Fault(
        "lib/flash_attention/hopper/unpadded.py",
        "num_heads // key_heads, num_queries",
        "key_heads, num_queries",
        TEST_FORWARD,
    ),
    # the backward kernel: turns that nobody passes, and those of a reversed section counted wrongly
    Fault(CUDA + "hopper_backward.cuh", "turn + 1", "turn", TEST_BACKWARD),
    Fault(
        CUDA + "hopper_backward.cuh",
        "args.key_tiles - 1) - key_tile",
        "args.key_tiles - 1)",
        TEST_BACKWARD,
    ),
    # the one for wide heads: a tile of queries that sees half of a block's keys, a mask one off, a
    # rotation the wrong way
    Fault(
        CUDA + "hopper_backward.cuh",
        "((query_tile + 1) * QUERIES - 1) / KEYS",
        "query_tile * QUERIES / KEYS",
        TEST_BACKWARD,
    ),
    Fault(
        CUDA + "hopper_backward_wide.cu",
        "is_visible &= key <= query",
        "is_visible &= key < query",
        TEST_BACKWARD,
    ),
    Fault(CUDA + "hopper_backward_wide.cu", "(is_odd ? -other : other)", "other", TEST_BACKWARD),
]
