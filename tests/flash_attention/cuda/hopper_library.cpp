// A library of the Hopper kernels of SOURCE, whose argument is an ARGUMENTS, for a CPU;
// `hopper_emulator.py` calls it.
extern const bool is_bfloat16 = BFLOAT16;
#include SOURCE

namespace emulator {
const char* run_blocks(void (*kernel)(), int blocks, int threads, int shared_bytes);
}

static void (*kernel)(ARGUMENTS);
static ARGUMENTS arguments;

// Run all blocks of a kernel, one after another; returns why that failed, or null.
extern "C" const char* run(void (*function)(ARGUMENTS), const ARGUMENTS* args, int blocks, int threads,
                           int shared_bytes) {
    kernel = function;
    memcpy((void*)&arguments, args, sizeof arguments);
    return emulator::run_blocks([] { kernel(arguments); }, blocks, threads, shared_bytes);
}
