// A library of the kernels of SOURCE for a CPU; `emulator.py` calls it.
extern const bool is_bfloat16 = BFLOAT16;
#include SOURCE

static void (*kernel)(Attention);
static Attention arguments;

// Run all blocks of a kernel, one after another; returns why that failed, or null.
extern "C" const char* run(void (*function)(Attention), const Attention* args, int blocks,
                           int threads, int shared_bytes, emulator::Counters* counters) {
    using namespace emulator;
    kernel = function, arguments = *args;
    body = [] { kernel(arguments); };
    fibers.resize(threads);
    memory.resize(shared_bytes / sizeof(uint4));
    emulator::counters = {};
    static std::vector<char> stacks;
    stacks.resize(size_t(threads) * STACK);
    for (int i = 0; i < threads; ++i) fibers[i].stack = stacks.data() + size_t(i) * STACK;
    if (_setjmp(failure)) return message;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        run_block();
    }
    *counters = emulator::counters;
    return nullptr;
}
