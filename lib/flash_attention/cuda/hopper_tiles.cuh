// What the Hopper kernels do with tiles, in more than one instruction.
#pragma once
#include <hopper.cuh>

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int TILES = (DIM + COLUMNS - 1) / COLUMNS;  // of 64 columns, across a head

DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int warp_of_four() { return threadIdx.x / 32 % 4; }

// This warp has read what the barrier guards.
DEVICE void release(unsigned barrier) {
    __syncwarp();
    if (lane() == 0) arrive(barrier);
}

// Copy `rows` rows of all tiles across a head.
DEVICE void load_tiles(unsigned to, const TensorMap& map, int rows, int row, int head, int batch,
                       unsigned barrier) {
    for (int i = 0; i < TILES; ++i)
        load_tile(to + i * rows * ROW_BYTES, map, i * COLUMNS, row, head, batch, barrier);
}

// Tiles in registers

template <int N>
DEVICE void set_zero(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
}

template <int N>
DEVICE void scale_by(float (&x)[N][4], float factor) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] *= factor;
}

// C = 64 rows · tileᵀ, across a head. A_TILE and B_TILE are the bytes from 64 columns of these to the next.
template <int A_TILE, int B_TILE, int N>
DEVICE void issue_transposed(float (&c)[N][4], unsigned rows, unsigned tile) {
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
        unsigned long long a = operand(rows, i / 4 * A_TILE + i % 4 * 32);
        unsigned long long b = operand(tile, i / 4 * B_TILE + i % 4 * 32);
        i ? multiply_add<0>(c, a, b) : multiply<0>(c, a, b);
    }
    end_matmuls();
}

// The registers of a result, rounded to 16 bits, are those of a left operand.
template <int N>
DEVICE void to_operand(unsigned (&to)[N][4], const float (&x)[2 * N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        to[i][0] = pack(x[2 * i][0], x[2 * i][1]);
        to[i][1] = pack(x[2 * i][2], x[2 * i][3]);
        to[i][2] = pack(x[2 * i + 1][0], x[2 * i + 1][1]);
        to[i][3] = pack(x[2 * i + 1][2], x[2 * i + 1][3]);
    }
}

// C += A · tile, with A in registers. B_TILE are the bytes from 64 columns of the tile to the next.
template <int B_TILE, int D, int N>
DEVICE void issue_from_registers(float (&c)[D][4], unsigned (&a)[N][4], unsigned tile) {
    keep(a);
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < N; ++i) multiply_add<1>(c, a[i], operand(tile, i * 16 * ROW_BYTES, B_TILE));
    end_matmuls();
}

// Round a warpgroup's 64 rows to 16 bits and copy them to memory by way of tiles in shared memory.
template <int N>
DEVICE void store_rows(const float (&x)[N][4], const TensorMap& map, int row, int column, int head,
                       int batch, unsigned tiles, int next_tile, int barrier) {
    int place = 16 * warp_of_four() + lane() % 16;  // the row that this lane names
    unsigned pairs[N / 2][4];
    to_operand(pairs, x);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        int chunk = (2 * (i % 4) + lane() / 16) ^ place % 8;
        store_matrices(tiles + i / 4 * next_tile + place * ROW_BYTES + chunk * 16, pairs[i]);
    }
    publish_stores();
    meet(barrier, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        for (int i = 0; i < (N + 7) / 8; ++i)
            store_tile(map, column + i * COLUMNS, row, head, batch, tiles + i * next_tile);
        end_copies();
    }
}
