// A library of the Hopper kernels of SOURCE, whose argument is an ARGUMENTS, for a CPU;
// `hopper_emulator.py` calls it.
#include SOURCE

static void (*kernel)(ARGUMENTS);
static ARGUMENTS arguments;

// Run all blocks of a kernel, one after another; returns why that failed, or null.
extern "C" const char* run(void (*function)(ARGUMENTS), const ARGUMENTS* args, int blocks, int threads,
                           int shared_bytes) {
    using namespace emulator;
    kernel = function;
    memcpy((void*)&arguments, args, sizeof arguments);
    body = [] { kernel(arguments); };
    fibers.resize(threads);
    memory.resize((shared_bytes + 15) / 16);
    static std::vector<char> stacks;
    stacks.resize(size_t(threads) * STACK);
    for (int i = 0; i < threads; ++i) fibers[i].stack = stacks.data() + size_t(i) * STACK;
    gridDim.x = blocks;
    if (_setjmp(failure)) return message;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        run_hopper_block();
    }
    return nullptr;
}
