// The instructions of lib/flash_attention/cuda/hopper.cuh on a CPU, for tests: what kernels see of
// hopper_emulator.cpp, which is compiled once for all of them.
#pragma once
#include "numbers.cuh"

#define __grid_constant__
#define __int_as_float(x) as_float(x)
struct float4 {
    float x, y, z, w;
};

inline Index gridDim;
constexpr int ROW_BYTES = 128, COLUMNS = 64, WARPGROUP = 128;

// A tensor in memory; the test writes these in place of the driver's.
struct alignas(64) TensorMap {
    unsigned short* data;
    long long strides[3];  // of batch, head and token
    int columns, rows, heads, batches, box;
    char unused[128 - 8 - 24 - 20];
};

namespace emulator {

constexpr unsigned BASE = 1024;  // of shared memory, whose address is not 0
struct Matmul {
    int n;
    bool adds, is_transposed, is_a_transposed, is_in_registers;
    float a[16][16];
    unsigned long long a_at, b_at;
    float (*c[32])[4];
};
const char* run_hopper_blocks(void (*kernel)(), int blocks, int threads, int shared_bytes);
void issue(Matmul matmul, float (*c)[4], const unsigned* a);
void wait_for_groups_of_matmuls(int left);
void wait_for_copies(int left);
void set_registers(int number);

}  // namespace emulator

void __syncthreads();
void __syncwarp();
float __shfl_xor_sync(unsigned, float x, int distance);
bool __any_sync(unsigned, bool x);
inline int __shfl_sync(unsigned, int x, int) { return x; }

inline unsigned shared_memory_address() { return emulator::BASE; }
#define shared_memory shared_memory_address
float load_number(unsigned address);
float2 load_pair(unsigned address);
void store_four(unsigned address, const float (&x)[4]);

template <int N>
inline void take_registers() {
    emulator::set_registers(N);
}
template <int N>
inline void give_up_registers() {
    emulator::set_registers(N);
}

void announce(int barrier, int threads);
void meet(int barrier, int threads);
void make_barrier(unsigned barrier, int count);
inline void publish_barriers() {}
void arrive_and_expect(unsigned barrier, int bytes);
void arrive(unsigned barrier);
void wait(unsigned barrier, int parity);

void publish_stores();
void load_bytes(unsigned to, const void* from, int bytes, unsigned barrier);
void load_tile(unsigned to, const TensorMap& map, int column, int row, int head, int batch,
               unsigned barrier);
void store_tile(const TensorMap& map, int column, int row, int head, int batch, unsigned from);
void add_bytes(float* to, unsigned from, int bytes);
void end_copies();
template <int N>
inline void wait_until_read() {
    emulator::wait_for_copies(N);
}
void wait_until_written();
void wait_for_turn(const int* place, int turn);
void pass_turn(int* place, int next);

inline unsigned long long operand(unsigned address, int offset, int next_tile = 16) {
    unsigned low = (address >> 4) + (next_tile >> 4 << 16 | offset >> 4);
    return (unsigned long long)(1u << 30 | 8 * ROW_BYTES >> 4) << 32 | low;
}
inline void begin_matmuls() {}
void end_matmuls();
template <int N>
inline void wait_for_matmuls() {
    emulator::wait_for_groups_of_matmuls(N);
}
template <class T, int N>
inline void keep(T (&x)[N][4]) {
    asm volatile("" : : "r"(x) : "memory");
}
template <int TRANSPOSED, int A_TRANSPOSED = 0, int N>
inline void multiply(float (&c)[N][4], unsigned long long a, unsigned long long b) {
    emulator::issue({8 * N, false, TRANSPOSED, A_TRANSPOSED, false, {}, a, b, {}}, c, nullptr);
}
template <int TRANSPOSED, int A_TRANSPOSED = 0, int N>
inline void multiply_add(float (&c)[N][4], unsigned long long a, unsigned long long b) {
    emulator::issue({8 * N, true, TRANSPOSED, A_TRANSPOSED, false, {}, a, b, {}}, c, nullptr);
}
template <int TRANSPOSED, int N>
inline void multiply_add(float (&c)[N][4], const unsigned (&a)[4], unsigned long long b) {
    emulator::issue({8 * N, true, TRANSPOSED, false, true, {}, 0, b, {}}, c, a);
}
void store_matrices(unsigned row, const unsigned (&x)[4]);
void store_matrices_transposed(unsigned row, const unsigned (&x)[4]);
