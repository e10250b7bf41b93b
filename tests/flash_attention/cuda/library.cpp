// A library of the kernels of SOURCE for a CPU; `emulator.py` calls it. ARGUMENTS is the type of the
// kernels' argument, and RUN the emulator's function that runs all blocks.
extern const bool is_bfloat16 = BFLOAT16;
#include SOURCE

static void (*kernel)(ARGUMENTS);
static ARGUMENTS arguments;

// Returns why a kernel failed, or null.
extern "C" const char* run(void (*function)(ARGUMENTS), const ARGUMENTS* args, int blocks,
                           int threads, int shared_bytes) {
    kernel = function;
    memcpy((void*)&arguments, args, sizeof arguments);
    return emulator::RUN([] { kernel(arguments); }, blocks, threads, shared_bytes);
}
