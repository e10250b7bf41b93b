// The instructions of lib/flash_attention/cuda/instructions.cuh on a CPU, for tests.
//
// The threads of a block are fibers. What a warp does together happens once all of its 32 lanes have
// called the same function; a warp runs as far as the block's next barrier, and then another one
// does, so that a lost barrier shows as wrong results. Shared memory starts as NaN; reads and writes
// of chunks of 16 bytes are checked for bounds and races, and their bank conflicts are counted.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <set>
#include <vector>

#include "numbers.cuh"

// Fibers

namespace emulator {

constexpr int LANES = 32, STACK = 1 << 16, NOWHERE = -1;
enum State { READY, IN_WARP, AT_BARRIER, DONE };

struct Fiber {
    State state;
    ucontext_t start;
    jmp_buf place;
    bool has_started;
    // what the lane brings to the function that its warp calls
    const char* function;
    void* result;
    const void* input;
    unsigned pair[2];
    int distance;
    std::vector<uint4*> stores;
    // asynchronous copies, to perform when the thread waits for them
    std::vector<std::pair<uint4*, uint4>> copies;
    char* stack;
};

// Who last read and wrote a chunk of shared memory, since which barrier.
struct Chunk {
    int writer = NOWHERE, reader = NOWHERE;
    bool has_many_readers = false;
    long written = 0, read = 0;
};

struct Counters {
    long long multiplies, loads, load_conflicts, stores, store_conflicts;
};

// of the kernel that ran last; `emulator.py` reads them
extern "C" [[gnu::used]] inline Counters counters{};
inline std::vector<Fiber> fibers;
inline std::vector<uint4> memory;
inline std::vector<Chunk> chunks;
inline int current;
inline long barriers;
inline jmp_buf scheduler, failure;
inline char message[200];
inline void (*body)();

[[noreturn]] inline void fail(const char* text) {
    snprintf(message, sizeof message, "%s: block %u, thread %d", text, blockIdx.x, current);
    _longjmp(failure, 1);
}

inline void leave(State state) {
    fibers[current].state = state;
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

inline void begin() {
    body();
    fibers[current].state = DONE;
    _longjmp(scheduler, 1);
}

// Run the current fiber until it waits or ends.
inline void resume() {
    Fiber& fiber = fibers[current];
    threadIdx.x = current;
    if (_setjmp(scheduler)) return;
    if (fiber.has_started) _longjmp(fiber.place, 1);
    fiber.has_started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack = {fiber.stack, 0, STACK};
    makecontext(&fiber.start, begin, 0);
    setcontext(&fiber.start);
}

inline Chunk& chunk_of(const uint4* address) {
    long index = address - memory.data();
    if (index < 0 || index >= long(memory.size())) fail("outside of shared memory");
    return chunks[index];
}

// Cycles lost because eight chunks are not in eight different parts of the banks.
inline int conflicts(const std::vector<const uint4*>& eight) {
    std::set<const uint4*> distinct(eight.begin(), eight.end());
    int most = 0, count[8] = {};
    for (const uint4* address : distinct)
        most = std::max(most, ++count[(address - memory.data()) % 8]);
    return most - 1;
}

// The writes of a warp since it last did something together.
inline void count_stores(Fiber* lanes) {
    for (size_t i = 0; i < lanes[0].stores.size(); ++i)
        for (int first = 0; first < LANES; first += 8) {
            std::vector<const uint4*> eight;
            for (int l = first; l < first + 8; ++l) eight.push_back(lanes[l].stores.at(i));
            counters.store_conflicts += conflicts(eight);
            ++counters.stores;
        }
    for (int l = 0; l < LANES; ++l) lanes[l].stores.clear();
}

// Let `act` run on the 32 lanes once all of them call `function`.
template <class Act>
inline void together(const char* function, Act act) {
    Fiber* lanes = &fibers[current / LANES * LANES];
    fibers[current].function = function;
    for (int l = 0; l < LANES; ++l)
        if (l != current % LANES && lanes[l].state != IN_WARP) return leave(IN_WARP);
    for (int l = 0; l < LANES; ++l)
        if (strcmp(lanes[l].function, function)) fail("lanes of a warp call different functions");
    count_stores(lanes);
    act(lanes);
    for (int l = 0; l < LANES; ++l) lanes[l].state = READY;
}

inline void load(unsigned (&r)[4], const uint4* row, bool is_transposed) {
    fibers[current].result = r;
    fibers[current].input = row;
    together(is_transposed ? "load_transposed" : "load", [is_transposed](Fiber* lanes) {
        int warp = current / LANES;
        for (int matrix = 0; matrix < 4; ++matrix) {
            std::vector<const uint4*> rows;
            for (int l = 8 * matrix; l < 8 * matrix + 8; ++l) {
                rows.push_back((const uint4*)lanes[l].input);
                Chunk& chunk = chunk_of(rows.back());
                if (chunk.writer != warp && chunk.written == barriers) fail("read before a barrier");
                chunk.has_many_readers =
                    chunk.read == barriers && (chunk.has_many_readers || chunk.reader != warp);
                chunk.reader = warp, chunk.read = barriers;
            }
            for (int l = 0; l < LANES; ++l) {
                int row = l / 4, column = 2 * (l % 4);
                auto at = [&](int r, int c) { return unsigned(((const uint16_t*)rows[r])[c]); };
                unsigned low = is_transposed ? at(column, row) : at(row, column);
                unsigned high = is_transposed ? at(column + 1, row) : at(row, column + 1);
                ((unsigned*)lanes[l].result)[matrix] = low | high << 16;
            }
            counters.load_conflicts += conflicts(rows);
            ++counters.loads;
        }
    });
}

inline void begin_block() {
    chunks.assign(memory.size(), Chunk());
    memset(memory.data(), 255, memory.size() * sizeof(uint4));
    for (Fiber& fiber : fibers) {
        fiber.state = READY, fiber.has_started = false;
        fiber.stores.clear(), fiber.copies.clear();
    }
    barriers = 1;
}

inline void run_block() {
    begin_block();
    int warps = fibers.size() / LANES;
    while (true) {
        for (int i = 0; i < warps; ++i) {
            // the first warp first, then the last one first, and so on
            int warp = barriers % 2 ? i : warps - 1 - i;
            for (bool moved = true; moved;) {
                moved = false;
                for (current = warp * LANES; current < (warp + 1) * LANES; ++current)
                    if (fibers[current].state == READY) resume(), moved = true;
            }
        }
        int waiting = 0, done = 0;
        for (Fiber& fiber : fibers) waiting += fiber.state == AT_BARRIER, done += fiber.state == DONE;
        for (int warp = 0; warp < warps; ++warp) count_stores(&fibers[warp * LANES]);
        current = 0;
        if (done == int(fibers.size())) return;
        if (waiting < int(fibers.size())) fail("some threads wait for others that never come");
        for (Fiber& fiber : fibers) fiber.state = READY;
        ++barriers;
    }
}

// Run all blocks of a kernel, one after another; returns why that failed, or null.
inline const char* run_blocks(void (*kernel)(), int blocks, int threads, int shared_bytes,
                              void (*run_one)() = run_block) {
    body = kernel;
    counters = {};
    fibers.resize(threads);
    memory.resize((shared_bytes + 15) / 16);
    static std::vector<char> stacks;
    stacks.resize(size_t(threads) * STACK);
    for (int i = 0; i < threads; ++i) fibers[i].stack = stacks.data() + size_t(i) * STACK;
    if (_setjmp(failure)) return message;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        run_one();
    }
    return nullptr;
}

}  // namespace emulator

[[gnu::used]] inline void __syncthreads() { emulator::leave(emulator::AT_BARRIER); }

[[gnu::used]] inline float __shfl_xor_sync(unsigned, float x, int distance) {
    float result;
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.result = &result, fiber.input = &x, fiber.distance = distance;
    emulator::together("shuffle", [](emulator::Fiber* lanes) {
        for (int l = 0; l < emulator::LANES; ++l)
            *(float*)lanes[l].result = *(const float*)lanes[l ^ lanes[l].distance].input;
    });
    return result;
}

[[gnu::used]] inline bool __any_sync(unsigned, bool x) {
    bool result;
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.result = &result, fiber.input = &x;
    emulator::together("any", [](emulator::Fiber* lanes) {
        bool any = false;
        for (int l = 0; l < emulator::LANES; ++l) any |= *(const bool*)lanes[l].input;
        for (int l = 0; l < emulator::LANES; ++l) *(bool*)lanes[l].result = any;
    });
    return result;
}

inline void load_matrices(unsigned (&r)[4], const uint4* row) { emulator::load(r, row, false); }
inline void load_matrices_transposed(unsigned (&r)[4], const uint4* row) {
    emulator::load(r, row, true);
}

inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.result = c, fiber.input = a, fiber.pair[0] = b0, fiber.pair[1] = b1;
    emulator::together("multiply", [](emulator::Fiber* lanes) {
        float a[16][16], b[16][8];
        for (int l = 0; l < emulator::LANES; ++l)
            for (int i = 0; i < 4; ++i) {
                float2 x = unpack(((const unsigned*)lanes[l].input)[i]);
                int row = l / 4 + i % 2 * 8, column = l % 4 * 2 + i / 2 * 8;
                a[row][column] = x.x, a[row][column + 1] = x.y;
                if (i >= 2) continue;
                float2 y = unpack(lanes[l].pair[i]);
                b[l % 4 * 2 + 8 * i][l / 4] = y.x, b[l % 4 * 2 + 8 * i + 1][l / 4] = y.y;
            }
        for (int l = 0; l < emulator::LANES; ++l)
            for (int i = 0; i < 4; ++i) {
                float& c = ((float*)lanes[l].result)[i];
                for (int k = 0; k < 16; ++k) c += a[l / 4 + i / 2 * 8][k] * b[k][l % 4 * 2 + i % 2];
            }
        ++emulator::counters.multiplies;
    });
}

inline void store_shared(uint4* to, uint4 x) {
    using namespace emulator;
    Chunk& chunk = chunk_of(to);
    int warp = current / LANES;
    if (chunk.read == barriers && (chunk.has_many_readers || chunk.reader != warp))
        fail("written while others may still read it");
    if (chunk.written == barriers && chunk.writer != warp) fail("written by two warps");
    chunk.writer = warp, chunk.written = barriers;
    fibers[current].stores.push_back(to);
    *to = x;
}

// Until the thread has waited, what is there is neither the old nor the new.
inline void copy_async(uint4* to, const void* from, bool is_inside) {
    store_shared(to, {~0u, ~0u, ~0u, ~0u});
    uint4 x = is_inside ? *(const uint4*)from : uint4{0, 0, 0, 0};
    emulator::fibers[emulator::current].copies.push_back({to, x});
}

inline void wait_for_copies() {
    std::vector<std::pair<uint4*, uint4>>& copies = emulator::fibers[emulator::current].copies;
    for (auto [to, x] : copies) *to = x;
    copies.clear();
}

inline uint4* shared_memory() { return emulator::memory.data(); }
