// The emulator of the Hopper kernels; `emulator.py` compiles it once, and links it to kernels.
//
// Fibers and warps are those of instructions.cuh here. What hardware does later is done as late as it
// may be: copies when a thread waits for them, matmuls when their warp does, and until then the
// numbers are NaN. Checked are: reads by matmuls and copies of what has not been published, waits
// that never end, registers, and copies that the block's end would break off.
#include "instructions.cuh"

#include <deque>
#include <functional>
#include <map>

#include "hopper.cuh"

namespace emulator {

struct Barrier {
    int count, missing, bytes, phase;
};
struct Meeting {
    int threads = 0, came = 0;
    long number = 0;
};
// What a thread has started and not waited for, in groups; the last group is open.
struct Started {
    std::deque<std::vector<std::function<void()>>> copies{{}};
    std::vector<unsigned> unpublished;
};
// The same of a warp's matmuls.
struct Issued {
    std::deque<std::vector<Matmul>> groups{{}};
};

std::map<unsigned, Barrier> mbarriers;
std::map<unsigned, std::vector<std::function<void()>>> loads;
Meeting meetings[16];
std::vector<Started> started;
std::vector<Issued> issued;
std::vector<bool> is_unpublished;  // chunks of 16 bytes
std::vector<int> registers;        // of each thread
long progress;

char* bytes_at(unsigned address, int size) {
    if (address < BASE || address + size > BASE + memory.size() * 16) fail("outside of shared memory");
    return (char*)memory.data() + (address - BASE);
}

// Let other fibers run until `condition` holds.
template <class Condition>
void wait_until(Condition condition) {
    while (!condition()) leave(READY);
    ++progress;
}

unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// Read by the tensor cores or the copy engine
const void* read_async(unsigned address, int size) {
    if (is_unpublished[(address - BASE) / 16]) fail("read before it was published");
    return bytes_at(address, size);
}
float number_at(unsigned address) { return to_float(*(const uint16_t*)read_async(address, 2)); }

// Written by ordinary stores
void store_bytes_generic(unsigned address, const void* from, int size) {
    memcpy(bytes_at(address, size), from, size);
    is_unpublished[(address - BASE) / 16] = true;
    started[current].unpublished.push_back((address - BASE) / 16);
}

void complete(Barrier& barrier) {
    if (barrier.missing || barrier.bytes) return;
    barrier.phase ^= 1, barrier.missing = barrier.count;
    ++progress;
}

Barrier& barrier_at(unsigned address) {
    if (!mbarriers.count(address)) fail("no barrier here");
    return mbarriers[address];
}

// The number of an operand in row (of A) or column (of B) `i`, at depth `k`
float operand_at(unsigned long long at, bool is_transposed, int i, int k) {
    unsigned start = (at & 0x3fff) << 4, next_columns = (at >> 16 & 0x3fff) << 4;
    unsigned next_rows = (at >> 32 & 0x3fff) << 4;
    if (at >> 62 != 1) fail("an operand without the 128-byte swizzle");
    unsigned offset = is_transposed
                          ? i / 64 * next_columns + k / 8 * next_rows + k % 8 * 128 + i % 64 * 2
                          : i / 8 * next_rows + i % 8 * 128 + k * 2;
    return number_at(swizzled(start + offset));
}

void perform(const Matmul& matmul, int warp) {
    float a[16][16];
    static float b[16][256];
    for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < matmul.n; ++n)
            b[k][n] = operand_at(matmul.b_at, matmul.is_transposed, n, k);
        for (int m = 0; m < 16; ++m)
            a[m][k] = matmul.is_in_registers ? matmul.a[m][k]
                                             : operand_at(matmul.a_at, matmul.is_a_transposed,
                                                          warp % 4 * 16 + m, k);
    }
    for (int l = 0; l < LANES; ++l)
        for (int i = 0; i < matmul.n / 8; ++i)
            for (int j = 0; j < 4; ++j) {
                float sum = matmul.adds ? matmul.c[l][i][j] : 0;
                const float* row = a[l / 4 + j / 2 * 8];
                for (int k = 0; k < 16; ++k) sum += row[k] * b[k][8 * i + l % 4 * 2 + j % 2];
                matmul.c[l][i][j] = sum;
            }
}

void wait_for_groups(int left) {
    int warp = current / LANES;
    Issued& queue = issued[warp];
    while (int(queue.groups.size()) - 1 > left) {
        for (const Matmul& matmul : queue.groups.front()) perform(matmul, warp);
        queue.groups.pop_front();
    }
}

void wait_for_groups_of_matmuls(int left) {
    // all lanes first, as the results of one are computed with those of the others
    together("wait_for_matmuls", [left](Fiber*) { wait_for_groups(left); });
}

// Issue a matmul once all lanes of the warp are here.
void issue(Matmul matmul, float (*c)[4], const unsigned* a) {
    fibers[current].result = c, fibers[current].input = a;
    together("matmul", [matmul](Fiber* lanes) mutable {
        ++progress;
        for (int l = 0; l < LANES; ++l) {
            matmul.c[l] = (float (*)[4])lanes[l].result;
            for (int i = 0; i < 4 && matmul.is_in_registers; ++i) {
                float2 x = unpack(((const unsigned*)lanes[l].input)[i]);
                int row = l / 4 + i % 2 * 8, column = l % 4 * 2 + i / 2 * 8;
                matmul.a[row][column] = x.x, matmul.a[row][column + 1] = x.y;
            }
            for (int i = 0; i < matmul.n / 8 && !matmul.adds; ++i)
                for (int j = 0; j < 4; ++j) matmul.c[l][i][j] = NAN;
        }
        issued[current / LANES].groups.back().push_back(matmul);
    });
}

void start(std::function<void()> copy) { started[current].copies.back().push_back(copy); }

void wait_for_copies(int left) {
    auto& groups = started[current].copies;
    while (int(groups.size()) - 1 > left) {
        for (auto& copy : groups.front()) copy();
        groups.pop_front();
    }
}

// Registers of all threads when a block of this many starts, and later
int registers_at_start(int threads) { return 65536 / threads / 8 * 8; }
void set_registers(int number) {
    registers[current] = number;
    int sum = 0;
    for (int x : registers) sum += x;
    // threads may still give up some; what must hold is checked at the block's end
    ++progress;
}

void run_hopper_block() {
    int threads = fibers.size();
    begin_block();
    mbarriers.clear(), loads.clear();
    for (Meeting& meeting : meetings) meeting = {};
    started.assign(threads, {}), issued.assign(threads / LANES, {});
    is_unpublished.assign(memory.size(), false);
    registers.assign(threads, registers_at_start(threads));
    static unsigned random = 1;
    for (int idle = 0;;) {
        long before = progress;
        int first = (random = random * 1664525 + 1013904223) >> 16, moved = 0, done = 0, waiting = 0;
        for (int i = 0; i < threads; ++i) {
            // any warp can come first
            current = (i + first % (threads / LANES) * LANES) % threads;
            if (fibers[current].state == READY) resume(), ++moved;
            done += fibers[current].state == DONE;
        }
        for (Fiber& fiber : fibers) waiting += fiber.state == AT_BARRIER;
        if (done == threads) break;
        if (waiting && waiting + done == threads) {
            for (Fiber& fiber : fibers)
                if (fiber.state == AT_BARRIER) fiber.state = READY, ++progress;
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > 100) fail("all threads wait");
    }
    int sum = 0;
    for (int x : registers) sum += x;
    current = 0;
    if (sum > threads * registers_at_start(threads)) fail("more registers than the block has");
    for (Started& thread : started)
        if (thread.copies.size() > 1 || thread.copies.back().size()) fail("a copy nobody waits for");
}

const char* run_hopper_blocks(void (*kernel)(), int blocks, int threads, int shared_bytes) {
    gridDim.x = blocks;
    return run_blocks(kernel, blocks, threads, shared_bytes, run_hopper_block);
}

}  // namespace emulator

void __syncwarp() {
    emulator::together("__syncwarp", [](emulator::Fiber*) {});
    ++emulator::progress;
}
float load_number(unsigned address) { return *(float*)emulator::bytes_at(address, 4); }
float2 load_pair(unsigned address) { return *(float2*)emulator::bytes_at(address, 8); }
void store_four(unsigned address, const float (&x)[4]) {
    emulator::store_bytes_generic(address, x, 16);
}
long come(int barrier, int threads) {
    emulator::Meeting& meeting = emulator::meetings[barrier];
    if (meeting.came && meeting.threads != threads) emulator::fail("another number of threads");
    meeting.threads = threads, ++emulator::progress;
    long number = meeting.number;
    if (++meeting.came == threads) meeting.came = 0, ++meeting.number;
    return number;
}
void announce(int barrier, int threads) { come(barrier, threads); }
void meet(int barrier, int threads) {
    long number = come(barrier, threads);
    emulator::wait_until([=] { return emulator::meetings[barrier].number > number; });
}

void make_barrier(unsigned barrier, int count) {
    emulator::mbarriers[barrier] = {count, count, 0, 0};
}
void arrive_and_expect(unsigned barrier, int bytes) {
    emulator::Barrier& found = emulator::barrier_at(barrier);
    found.bytes += bytes;
    if (--found.missing < 0) emulator::fail("more arrivals than expected");
    ++emulator::progress;
    complete(found);
}
void arrive(unsigned barrier) { arrive_and_expect(barrier, 0); }
void wait(unsigned barrier, int parity) {
    emulator::wait_until([=] {
        emulator::Barrier& found = emulator::barrier_at(barrier);
        std::vector<std::function<void()>> copies;
        copies.swap(emulator::loads[barrier]);
        for (auto& copy : copies) copy();
        complete(found);
        return found.phase != parity;
    });
}

void publish_stores() {
    for (unsigned chunk : emulator::started[emulator::current].unpublished)
        emulator::is_unpublished[chunk] = false;
    emulator::started[emulator::current].unpublished.clear();
}
void load_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    memset(emulator::bytes_at(to, bytes), 255, bytes);
    emulator::loads[barrier].push_back([=] {
        memcpy(emulator::bytes_at(to, bytes), from, bytes);
        emulator::barrier_at(barrier).bytes -= bytes;
    });
}
unsigned short* element(const TensorMap& map, int column, int row, int head, int batch) {
    bool is_inside = column < map.columns && row < map.rows && head < map.heads && batch < map.batches;
    return is_inside ? map.data + batch * map.strides[0] + head * map.strides[1] +
                           row * map.strides[2] + column
                     : nullptr;
}
void load_tile(unsigned to, const TensorMap& map, int column, int row, int head, int batch,
                      unsigned barrier) {
    if (to % 1024) emulator::fail("a tile must begin at a multiple of 1024 bytes");
    memset(emulator::bytes_at(to, map.box * ROW_BYTES), 255, map.box * ROW_BYTES);
    emulator::loads[barrier].push_back([=, &map] {
        for (int i = 0; i < map.box; ++i)
            for (int j = 0; j < COLUMNS; ++j) {
                const unsigned short* from = element(map, column + j, row + i, head, batch);
                unsigned place = emulator::swizzled(to + i * ROW_BYTES + j * 2);
                *(unsigned short*)emulator::bytes_at(place, 2) = from ? *from : 0;
            }
        emulator::barrier_at(barrier).bytes -= map.box * ROW_BYTES;
    });
}
void store_tile(const TensorMap& map, int column, int row, int head, int batch,
                       unsigned from) {
    emulator::start([=, &map] {
        for (int i = 0; i < map.box; ++i)
            for (int j = 0; j < COLUMNS; ++j)
                if (unsigned short* to = element(map, column + j, row + i, head, batch)) {
                    unsigned place = emulator::swizzled(from + i * ROW_BYTES + j * 2);
                    *to = *(const unsigned short*)emulator::read_async(place, 2);
                }
    });
}
void add_bytes(float* to, unsigned from, int bytes) {
    emulator::start([=] {
        for (int i = 0; i < bytes / 4; ++i)
            to[i] += *(const float*)emulator::read_async(from + 4 * i, 4);
    });
}
void end_copies() { emulator::started[emulator::current].copies.push_back({}); }
void wait_until_written() { emulator::wait_for_copies(0); }
void wait_for_turn(const int* place, int turn) {
    emulator::wait_until([=] { return *place == turn; });
}
void pass_turn(int* place, int next) {
    auto& copies = emulator::started[emulator::current].copies;
    if (copies.size() > 1) emulator::fail("a turn passed before its additions are there");
    *place = next;
}

void end_matmuls() {
    emulator::together("end_matmuls", [](emulator::Fiber*) {
        emulator::issued[emulator::current / emulator::LANES].groups.push_back({});
    });
}
void store_matrices_of_warp(unsigned row, const unsigned (&x)[4], bool is_transposed) {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.input = x, fiber.pair[0] = row;
    emulator::together("store_matrices", [is_transposed](emulator::Fiber* lanes) {
        int own = emulator::current;
        for (int l = 0; l < emulator::LANES; ++l) {
            uint16_t numbers[8];
            for (int c = 0; c < 8; ++c) {
                // row l % 8 of matrix l / 8, column c
                int from = is_transposed ? c * 4 + l % 8 / 2 : l % 8 * 4 + c / 2;
                int part = is_transposed ? l % 2 : c % 2;
                numbers[c] = ((const unsigned*)lanes[from].input)[l / 8] >> 16 * part;
            }
            emulator::current = own / emulator::LANES * emulator::LANES + l;
            emulator::store_bytes_generic(lanes[l].pair[0], numbers, 16);
        }
        emulator::current = own;
    });
}
void store_matrices(unsigned row, const unsigned (&x)[4]) {
    store_matrices_of_warp(row, x, false);
}
void store_matrices_transposed(unsigned row, const unsigned (&x)[4]) {
    store_matrices_of_warp(row, x, true);
}
