// The instructions of Hopper GPUs that C++ has no words for, each as a function.
//
// Addresses in shared memory are 32-bit numbers. Tiles there have rows of 128 bytes, 64 numbers of
// 16 bits, and begin at multiples of 1,024 bytes; the eight chunks of 16 bytes of row r are kept in
// the order of (chunk XOR r mod 8), which the copy engine and the tensor cores know as the 128-byte
// swizzle: eight rows of one column of chunks then lie in different banks. A matrix with more columns
// is several such tiles, one behind the other.
#pragma once

#include <numbers.cuh>

constexpr int ROW_BYTES = 128;    // of a tile
constexpr int COLUMNS = 64;       // of a tile
constexpr int WARPGROUP = 128;    // threads that multiply together

// A description of a tensor in memory and of the tiles to be copied, made by the driver.
struct alignas(64) TensorMap {
    char bytes[128];
};

// The block's shared memory.
DEVICE unsigned shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return (unsigned)__cvta_generic_to_shared(memory);
}

DEVICE float load_number(unsigned address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}

DEVICE float2 load_pair(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

DEVICE void store_four(unsigned address, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

// Registers of each thread of this warpgroup from here on. What all threads of a block have together
// cannot become more than what they started with: taking more waits forever.
template <int N>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(N));
}
template <int N>
DEVICE void give_up_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(N));
}

// Barriers between some of the threads

// Wait at a named barrier (1 to 15) until `threads` threads have come to it.
DEVICE void meet(int barrier, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// Count as having come to a named barrier, without waiting there.
DEVICE void announce(int barrier, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// A barrier in shared memory, 8 bytes, that completes a phase after `count` arrivals, once all bytes
// that it was told to expect are there.
DEVICE void make_barrier(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(count) : "memory");
}

// Let other threads and the copy engine see new barriers.
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }

DEVICE void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

DEVICE void arrive_and_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(barrier), "r"(bytes)
                 : "memory");
}

// Wait until the phase of this parity is over; on a new barrier that of parity 1 counts as over.
DEVICE void wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}"
        :
        : "r"(barrier), "r"(parity)
        : "memory");
}

// Copies by the copy engine, each started by one thread

// What ordinary stores wrote to shared memory becomes visible to copies and matmuls.
DEVICE void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// Copy a tile from (column, row, head, batch) on; its bytes count as arrivals at the barrier.
DEVICE void load_tile(unsigned to, const TensorMap& map, int column, int row, int head, int batch,
                      unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];"
        :
        : "r"(to), "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}

// Copy plain bytes.
DEVICE void load_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(to), "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Copy a tile to memory; what lies outside of the tensor is left out.
DEVICE void store_tile(const TensorMap& map, int column, int row, int head, int batch,
                       unsigned from) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
        :
        : "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(from)
        : "memory");
}

// Add float32 numbers to those in memory.
DEVICE void add_bytes(float* to, unsigned from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// The stores and additions that this thread started since the last call are a group.
DEVICE void end_copies() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }

// Wait until all but this thread's N latest groups have read shared memory.
template <int N>
DEVICE void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(N) : "memory");
}

// Wait until what this thread's groups wrote is in memory, where other threads can see it.
DEVICE void wait_until_written() { asm volatile("cp.async.bulk.wait_group 0;" : : : "memory"); }

// Turns, between blocks

// Wait for a turn. The additions that this thread starts next come after those of the turn before.
DEVICE void wait_for_turn(const int* place, int turn) {
    int found;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(place) : "memory");
    while (found != turn);
    asm volatile("fence.proxy.async.global;" : : : "memory");
}

// Let the next one come, once what this thread wrote is there.
DEVICE void pass_turn(int* place, int next) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" : : "l"(place), "r"(next) : "memory");
}

// Matmuls of a warpgroup, asynchronous
//
// Warp w of the four holds rows 16w to 16w + 15 of the left operand A and of the result C, as
// fragments: with g = lane / 4 and t = lane % 4, a lane's c[i] are row g of the 16, columns 8i + 2t and
// 8i + 2t + 1, then the same of row g + 8; and its a[i] are pairs of numbers of 16 bits: rows g and
// g + 8, columns 16i + 2t and 16i + 2t + 1, then rows g and g + 8, columns 8 further. Two neighbors of
// C, rounded, so are one of A.

// An operand in shared memory: where it begins, and how far apart its groups of eight rows are.
// `next_tile` are the bytes from a tile to that of the next 64 columns; they are only read of a
// transposed operand.
DEVICE unsigned long long operand(unsigned address, int offset, int next_tile = 16) {
    unsigned low = (address >> 4) + (next_tile >> 4 << 16 | offset >> 4);
    unsigned high = 1u << 30 | 8 * ROW_BYTES >> 4;
    return (unsigned long long)high << 32 | low;
}

// What was written to registers of operands and results becomes visible to the matmuls to come.
DEVICE void begin_matmuls() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

// The matmuls issued since the last call are a group.
DEVICE void end_matmuls() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Wait for all but the N latest groups. What they wrote must go through `keep` before it is read.
template <int N>
DEVICE void wait_for_matmuls() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

// Registers that an asynchronous matmul reads or writes: not to be moved past this line.
template <int N>
DEVICE void keep(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3]) : : "memory");
}
template <int N>
DEVICE void keep(unsigned (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3]) : : "memory");
}

// The registers of results of N fragments, for assembly
#define FOUR(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FOUR_NEW(c, i) "=f"(c[i][0]), "=f"(c[i][1]), "=f"(c[i][2]), "=f"(c[i][3])
#define TWO(of, c, i) of(c, i), of(c, i + 1)
#define REGISTERS_4(of, c) TWO(of, c, 0), TWO(of, c, 2)
#define REGISTERS_8(of, c) REGISTERS_4(of, c), TWO(of, c, 4), TWO(of, c, 6)
#define REGISTERS_10(of, c) REGISTERS_8(of, c), TWO(of, c, 8)
#define REGISTERS_12(of, c) REGISTERS_10(of, c), TWO(of, c, 10)
#define REGISTERS_14(of, c) REGISTERS_12(of, c), TWO(of, c, 12)
#define REGISTERS_16(of, c) REGISTERS_14(of, c), TWO(of, c, 14)
#define REGISTERS_20(of, c) REGISTERS_16(of, c), TWO(of, c, 16), TWO(of, c, 18)
#define REGISTERS_24(of, c) REGISTERS_20(of, c), TWO(of, c, 20), TWO(of, c, 22)

// and their names in it
#define NAMES_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_8                                                                         \
    NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_10 NAMES_8 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_12 NAMES_10 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_14 NAMES_12 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_16 NAMES_14 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_20                                                                        \
    NAMES_16 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_24                                                                        \
    NAMES_20 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// Every size that a kernel has: N, columns of C, and the names of the operands after its 4N registers
#define FOR_EVERY_SIZE(CASE)             \
    CASE(4, 32, 16, 17, 18, 19, 20, 21)  \
    CASE(8, 64, 32, 33, 34, 35, 36, 37)  \
    CASE(10, 80, 40, 41, 42, 43, 44, 45) \
    CASE(12, 96, 48, 49, 50, 51, 52, 53) \
    CASE(14, 112, 56, 57, 58, 59, 60, 61) \
    CASE(16, 128, 64, 65, 66, 67, 68, 69) \
    CASE(20, 160, 80, 81, 82, 83, 84, 85) \
    CASE(24, 192, 96, 97, 98, 99, 100, 101)
#define MATMUL(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." TYPE "." TYPE
#define IS_SIZE(SIZE, ...) || N == SIZE
template <int N>
constexpr bool has_size = false FOR_EVERY_SIZE(IS_SIZE);

// C = A B: A is 64 × 16, B is 16 × 8N. Both lie in shared memory; A as rows of 16, B as columns of 16,
// or, if TRANSPOSED or A_TRANSPOSED, the other way.
template <int TRANSPOSED, int A_TRANSPOSED = 0, int N>
DEVICE void multiply(float (&c)[N][4], unsigned long long a, unsigned long long b) {
    static_assert(has_size<N>);
#define CASE(SIZE, n, i, j, k, l, ...)                                                          \
    if constexpr (N == SIZE)                                                                    \
        asm volatile("{.reg .pred adds; setp.ne.b32 adds, 0, 0;\n" MATMUL(n) " {" NAMES_##SIZE \
                     "}, %" #i ", %" #j ", adds, 1, 1, %" #l ", %" #k ";}"                      \
                     : REGISTERS_##SIZE(FOUR_NEW, c)                                            \
                     : "l"(a), "l"(b), "n"(TRANSPOSED), "n"(A_TRANSPOSED));
    FOR_EVERY_SIZE(CASE)
#undef CASE
}

// C += A B
template <int TRANSPOSED, int A_TRANSPOSED = 0, int N>
DEVICE void multiply_add(float (&c)[N][4], unsigned long long a, unsigned long long b) {
    static_assert(has_size<N>);
#define CASE(SIZE, n, i, j, k, l, ...)                                                       \
    if constexpr (N == SIZE)                                                                 \
        asm volatile(MATMUL(n) " {" NAMES_##SIZE "}, %" #i ", %" #j ", 1, 1, 1, %" #l ", %" #k \
                               ";"                                                           \
                     : REGISTERS_##SIZE(FOUR, c)                                             \
                     : "l"(a), "l"(b), "n"(TRANSPOSED), "n"(A_TRANSPOSED));
    FOR_EVERY_SIZE(CASE)
#undef CASE
}

// C += A B, with A in registers.
template <int TRANSPOSED, int N>
DEVICE void multiply_add(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b) {
    static_assert(has_size<N>);
#define CASE(SIZE, n, i, j, k, l, m, o)                                                      \
    if constexpr (N == SIZE)                                                                 \
        asm volatile(MATMUL(n) " {" NAMES_##SIZE "}, {%" #i ", %" #j ", %" #k ", %" #l       \
                               "}, %" #m ", 1, 1, 1, %" #o ";"                               \
                     : REGISTERS_##SIZE(FOUR, c)                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
    FOR_EVERY_SIZE(CASE)
#undef CASE
}

// Store four 8×8 matrices of 16-bit numbers: lanes 8i to 8i + 7 name the eight rows of matrix i, of 16
// bytes each; every lane brings a pair of each matrix, x[i].
DEVICE void store_matrices(unsigned row, const unsigned (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(row), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// The same, with each matrix transposed.
DEVICE void store_matrices_transposed(unsigned row, const unsigned (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(row), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
