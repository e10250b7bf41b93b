// Tiles of matrices: from memory to shared memory, to fragments, through tensor cores and back.
//
// Constants of a build: DIM, the head_dim padded to a multiple of 32; ROWS, the rows of the result
// that a block of WARPS warps computes; COLUMNS, the rows of a tile of the other matrices, which
// all warps share; STEP, how many of those a warp takes at a time; BLOCKS, the blocks that
// should fit a multiprocessor at once, which limits registers; ASYNC, whether tiles are copied
// without registers, which Turing cannot; STAGES, the pairs of tiles that shared memory holds;
// ROWS_IN_SHARED, whether a block's own rows stay there rather than in registers.
#pragma once
#include <instructions.cuh>

constexpr int THREADS = 32 * WARPS;
// 16×16 blocks: down the rows of a warp, and across head_dim
constexpr int M = ROWS / WARPS / 16;
constexpr int D = DIM / 16;
static_assert(ROWS == 16 * M * WARPS && DIM == 32 * (DIM / 32) && COLUMNS % STEP == 0, "tiles");

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// A (batch, heads, tokens, head_dim) tensor of 16-bit numbers: strides in elements; the last is 1.
struct Tensor {
    unsigned short* data;
    long long batch, head;
    int token;

    DEVICE unsigned short* rows(int b, int h) const { return data + b * batch + h * head; }
};

// The arguments of every kernel; `launch.py` has the same structure. lse and delta are float32,
// (batch, heads, queries); neighboring heads of q, `group` of them, share one of k and v.
struct Attention {
    Tensor q, k, v, out, grad_out, grad_q, grad_k, grad_v;
    float *lse, *delta;
    int batch_size, num_heads, group, num_queries, num_keys, head_dim, is_causal;
    float scale;
};

// The log-sum-exp of a row in base 2, +inf where all of its weights must be 0: past the last query,
// and for a query whose scores are all -inf.
DEVICE float weight_base(float lse) { return lse == -INFINITE ? INFINITE : lse * LOG2_E; }

DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int warp() { return threadIdx.x / 32; }

// A lane's part of an accumulator c[M][N][4] is R rows, 8 apart, of 2 N numbers each.
constexpr int R = 2 * M;

DEVICE int row_of(int r) { return 8 * r + lane() / 4; }
DEVICE int column_of(int i) { return 8 * (i / 2) + 2 * (lane() % 4) + i % 2; }

template <int N>
DEVICE float& element(float (&c)[M][N][4], int r, int i) {
    return c[r / 2][i / 2][r % 2 * 2 + i % 2];
}

// A tile of `ROWS` rows in shared memory. A row is cut into chunks of 8 numbers, 16 bytes, which are
// what a thread copies and what ldmatrix reads. Memory has 32 banks of 4 bytes, so eight chunks are
// read at once if they are in different eighths of 128 bytes. Chunk c of eight consecutive rows would
// be in the same eighth wherever rows are 128 bytes long. *Swizzling* stores it at c ^ (row % 8).
struct Tile {
    static constexpr int CHUNKS = DIM / 8;
    uint4* data;

    DEVICE uint4* at(int row, int chunk) const {
        // in rows of 64 or 192 bytes two neighbors differ by half of 128 bytes already
        constexpr int GROUP = CHUNKS % 8 ? 4 : 8;
        int swizzle = row / (8 / GROUP) % GROUP;
        return data + row * CHUNKS + chunk / GROUP * GROUP + (chunk % GROUP ^ swizzle);
    }

    // The 16×16 block at a row and an even chunk, as four 8×8 matrices: upper left, lower left, upper right,
    // lower right.
    DEVICE const uint4* block(int row, int chunk) const {
        return at(row + lane() % 16, chunk ^ lane() / 16);
    }
};

// A tile on its way from memory to shared memory. Turing has no asynchronous copies: there, a thread
// loads its chunks into registers, computes something, and stores them when they are there.
struct Copy {
    static constexpr int COUNT = COLUMNS * DIM / 8 / THREADS;
    static_assert(COLUMNS * DIM / 8 == COUNT * THREADS, "each thread copies as much");
#if !ASYNC
    uint4 chunks[COUNT];
#endif

    // Rows from `first` on; zeros past the last row and the last column.
    DEVICE void begin(Tile tile, const unsigned short* rows, int stride, int first, int num_rows,
                      int head_dim) {
        const unsigned short* start = rows + (long long)first * stride;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            int index = threadIdx.x + i * THREADS;
            int row = index / Tile::CHUNKS, chunk = index % Tile::CHUNKS;
            const unsigned short* from = start + row * stride + 8 * chunk;
            bool is_inside = first + row < num_rows && 8 * chunk < head_dim;
#if ASYNC
            copy_async(tile.at(row, chunk), from, is_inside);
#else
            chunks[i] = is_inside ? *(const uint4*)from : uint4{0, 0, 0, 0};
#endif
        }
    }

    // Once all threads have passed the next barrier, the tile is there.
    DEVICE void finish(Tile tile) const {
#if ASYNC
        wait_for_copies();
#else
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            int index = threadIdx.x + i * THREADS;
            store_shared(tile.at(index / Tile::CHUNKS, index % Tile::CHUNKS), chunks[i]);
        }
#endif
    }
};

// The first or second tile of a stage. With two stages, the tiles of one are on their way while those
// of the other are worked on.
static_assert(STAGES == 1 || STAGES == 2 && ASYNC, "registers hold the next tiles of a single stage");
DEVICE Tile tile_of(int stage, int index) {
    return {shared_memory() + (2 * stage + index) * COLUMNS * Tile::CHUNKS};
}
DEVICE int next_stage(int stage) { return STAGES == 2 ? 1 - stage : 0; }

// A warp's own rows, the left operand of matmuls: in registers, or, if there is room, in shared
// memory, which leaves more registers for results.
struct Operand {
#if ROWS_IN_SHARED
    static_assert(ASYNC, "these rows come by asynchronous copies");
    Tile tile;

    // The index-th matrix that the block has rows of; they are there when the first tiles are.
    DEVICE void load(int index, const unsigned short* rows, int stride, int first, int num_rows,
                     int head_dim) {
        tile = {shared_memory() + STAGES * (2 * Tile::CHUNKS * COLUMNS + COLUMNS / 2) +
                (index * ROWS + warp() * 16 * M) * Tile::CHUNKS};
        const unsigned short* start = rows + (long long)first * stride;
#pragma unroll
        for (int i = lane(); i < 16 * M * Tile::CHUNKS; i += 32) {
            int row = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
            bool is_inside = first + row < num_rows && 8 * chunk < head_dim;
            copy_async(tile.at(row, chunk), start + row * stride + 8 * chunk, is_inside);
        }
    }

    // Columns 16 k to 16 k + 15.
    DEVICE void get(unsigned (&a)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; ++m) load_matrices(a[m], tile.block(16 * m, 2 * k));
    }
#else
    unsigned registers[M][D][4];

    DEVICE void load(int, const unsigned short* rows, int stride, int first, int num_rows,
                     int head_dim) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            int row = first + row_of(r);
            const unsigned short* start = rows + (long long)row * stride;
#pragma unroll
            for (int n = 0; n < 2 * D; ++n) {
                int column = column_of(2 * n);
                bool is_inside = row < num_rows && column < head_dim;
                registers[r / 2][n / 2][n % 2 * 2 + r % 2] =
                    is_inside ? *(const unsigned*)(start + column) : 0;
            }
        }
    }

    DEVICE void get(unsigned (&a)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][i] = registers[m][k][i];
    }
#endif
};

// An accumulator, rounded to 16 bits, as the left operand of the next matmul.
template <int N>
DEVICE void to_operand(unsigned (&a)[M][N / 2][4], float (&c)[M][N][4]) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int n = 0; n < N; ++n)
            a[r / 2][n / 2][n % 2 * 2 + r % 2] = pack(element(c, r, 2 * n), element(c, r, 2 * n + 1));
}

template <int N>
DEVICE void set_zero(float (&c)[M][N][4]) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) element(c, r, i) = 0;
}

// Set scores to -inf where there is no such query or key, and under a causal mask where the key comes
// after the query. Rows are queries and columns keys, or the other way round.
template <bool ROWS_ARE_KEYS, int N>
DEVICE void hide(float (&scores)[M][N][4], int first_row, int first_column, const Attention& args) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            int row = first_row + row_of(r), column = first_column + column_of(i);
            int query = ROWS_ARE_KEYS ? column : row, key = ROWS_ARE_KEYS ? row : column;
            bool is_outside = key >= args.num_keys || query >= args.num_queries;
            bool is_hidden = is_outside || (args.is_causal && key > query);
            if (is_hidden) element(scores, r, i) = -INFINITE;
        }
}

// c += a · tileᵀ, of 8 N rows of the tile from `first` on: scores, from queries and keys.
template <int N>
DEVICE void multiply_transposed(float (&c)[M][N][4], const Operand& operand, Tile tile, int first) {
#pragma unroll
    for (int k = 0; k < D; ++k) {
        unsigned a[M][4];
        operand.get(a, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned b[4];
            load_matrices(b, tile.block(first + 8 * n, 2 * k));
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add(c[m][n], a[m], b[0], b[2]);
                multiply_add(c[m][n + 1], a[m], b[1], b[3]);
            }
        }
    }
}

// c += a · tile, of 16 K rows of the tile from `first` on: the output, from weights and values.
template <int K>
DEVICE void multiply(float (&c)[M][2 * D][4], const unsigned (&a)[M][K][4], Tile tile, int first) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int n = 0; n < 2 * D; n += 2) {
            unsigned b[4];
            load_matrices_transposed(b, tile.block(first + 16 * k, n));
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add(c[m][n], a[m][k], b[0], b[1]);
                multiply_add(c[m][n + 1], a[m][k], b[2], b[3]);
            }
        }
}

// Write an accumulator times a factor to rows of memory, rounded to 16 bits.
DEVICE void store_rows(float (&c)[M][2 * D][4], float factor, unsigned short* rows, int stride,
                       int first, int num_rows, int head_dim) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        int row = first + row_of(r);
        unsigned short* start = rows + (long long)row * stride;
#pragma unroll
        for (int i = 0; i < 4 * D; i += 2) {
            int column = column_of(i);
            unsigned pair = pack(element(c, r, i) * factor, element(c, r, i + 1) * factor);
            if (row < num_rows && column < head_dim) *(unsigned*)(start + column) = pair;
        }
    }
}
