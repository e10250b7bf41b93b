// What the backward kernels for Hopper GPUs have in common: what a block works on, its loads, the
// additions to dQ, and the two small kernels before and after.
//
// Sums of floating-point numbers depend on their order. So that they are the same in every run, blocks
// take turns at each tile of dQ, in the order in which they start: see `Work` and `Step`.
//
// The kernel that includes this has defined:
//
//     KEYS               of a block
//     READERS            warpgroups that multiply
//     GRAD_OUT_STAGES    tiles of dO in shared memory at a time; of Q there are STAGES
//     GRAD_Q_STAGES      likewise of dQ
//     GRAD_S_BYTES       of all tiles of dS, and of P where it goes through shared memory
#pragma once
#include <hopper_tiles.cuh>

constexpr int STAGES = 2;

// A piece of a tile of dQ: 64 queries, and 64 columns or, of the last ones, as many as there are
constexpr int PIECE = 64 * COLUMNS, PIECE_BYTES = PIECE * 4;
static_assert(QUERIES / 64 * TILES == READERS, "as many pieces as warpgroups");
DEVICE constexpr int columns_of_piece(int piece) {
    return TILES > 1 && piece == READERS - 1 ? DIM - piece * COLUMNS : COLUMNS;
}

// Shared memory: tiles of 64 columns, pieces of dQ, numbers of queries, barriers
constexpr int KEY_TILE = KEYS * ROW_BYTES, QUERY_TILE = QUERIES * ROW_BYTES;  // bytes
constexpr int K_AT = 0;
constexpr int V_AT = K_AT + TILES * KEY_TILE;
constexpr int Q_AT = V_AT + TILES * KEY_TILE;                                  // for each stage
constexpr int GRAD_OUT_AT = Q_AT + STAGES * TILES * QUERY_TILE;                // for each stage
constexpr int GRAD_S_AT = GRAD_OUT_AT + GRAD_OUT_STAGES * TILES * QUERY_TILE;
constexpr int GRAD_Q_AT = GRAD_S_AT + GRAD_S_BYTES;                            // for each stage and piece
constexpr int LSE_AT = GRAD_Q_AT + GRAD_Q_STAGES * READERS * PIECE_BYTES;      // for each stage
constexpr int DELTA_AT = LSE_AT + STAGES * QUERIES * 4;                        // for each stage
constexpr int K_FULL = DELTA_AT + GRAD_OUT_STAGES * QUERIES * 4, V_FULL = K_FULL + 8;
constexpr int Q_FULL = V_FULL + 8, Q_EMPTY = Q_FULL + 8 * STAGES;
constexpr int GRAD_OUT_FULL = Q_EMPTY + 8 * STAGES;
constexpr int GRAD_OUT_EMPTY = GRAD_OUT_FULL + 8 * GRAD_OUT_STAGES;
constexpr int BARRIERS_END = GRAD_OUT_EMPTY + 8 * GRAD_OUT_STAGES;

// Named barriers, of which there are 16. OUTPUT_WRITTEN has the warpgroup's number added, PIECE_EMPTY the
// place, and PIECE_FULL READERS · stage + piece, of STAGES stages even if they have one place: so each of
// the two warps that add has barriers of its own.
enum { P_WRITTEN = 1, GRAD_S_WRITTEN = 2, OUTPUT_WRITTEN = 3, PIECE_EMPTY = 6, PIECE_FULL = 10 };
static_assert(GRAD_Q_STAGES * READERS <= PIECE_FULL - PIECE_EMPTY && PIECE_FULL + STAGES * READERS <= 16);

struct Rows {
    const unsigned short* data;
    long long batch, head, token;  // strides
};

struct Backward {
    TensorMap q, k, v, grad_out, grad_q, grad_k, grad_v;
    Rows out, grad_out_rows;
    const float* lse;        // (batch, heads, queries)
    float* lse_log2;         // (batch, heads, query_tiles · QUERIES), the same in base 2
    float* delta;            // likewise: rowsum(dO ∘ O)
    float* sums;             // of dQ: (batch, heads, query_tiles · QUERIES / 64, 64 · DIM)
    int* turns;              // (batch, heads, query_tiles): whose turn it is; null: add in any order
    const float *cos, *sin;  // (tokens, head_dim / 2), of the angles that q and k were rotated by
    int num_heads, group, num_queries, num_keys, query_tiles, key_tiles, head_dim;
    int key_heads;           // of all sequences
    int section;             // of these heads, those worked on at a time
    float scale;
};

// A block's keys. Blocks start in the order of their numbers. They go through the heads in sections whose
// queries fit the L2 cache; within a section, through the tiles of all its heads, those with the most
// work first.
//
// Where blocks take turns under a mask, this is how the last section goes, and all of them if heads share
// keys. In the others those with the least work come first: blocks that start together then come to a tile
// of dQ one after the other.
struct Work {
    int batch, key_head, key_tile;
    int first_tile;  // of the queries that see the keys
    int steps;       // tiles of queries of all heads of the group
    bool is_reversed;

    DEVICE Work(const Backward& args) {
        int first_head = blockIdx.x / (args.section * args.key_tiles) * args.section;
        int heads = min(args.section, args.key_heads - first_head);
        int number = blockIdx.x - first_head * args.key_tiles;  // in the section
        bool is_last = first_head + heads == args.key_heads;
        is_reversed = CAUSAL && args.turns && args.group == 1 && !is_last;
        key_tile = is_reversed ? args.key_tiles - 1 - number / heads : number / heads;
        int key_heads = args.num_heads / args.group;
        batch = (first_head + number % heads) / key_heads;
        key_head = (first_head + number % heads) % key_heads;
        first_tile = CAUSAL ? key_tile * KEYS / QUERIES : 0;
        steps = args.group * (args.query_tiles - first_tile);
    }

    // How many blocks of the head add to a tile of dQ before this one.
    DEVICE int turn(const Backward& args, int query_tile) const {
        if (!is_reversed) return key_tile;
        return min(((query_tile + 1) * QUERIES - 1) / KEYS, args.key_tiles - 1) - key_tile;
    }
};

// The steps of a block: the heads of its group, and of each head the tiles of queries, the last one first;
// if reversed, the first one. Under a mask all heads of a tile come before the next tile: else blocks of few
// tiles would wait at each head for those of many.
struct Step {
    int first_head, end_head, first_tile, by;
    int head, tile;
    int stage = 0, parity = 0;  // of what has STAGES stages

    DEVICE Step(const Backward& args, const Work& work) {
        first_head = head = work.key_head * args.group, end_head = head + args.group;
        first_tile = tile = work.is_reversed ? work.first_tile : args.query_tiles - 1;
        by = work.is_reversed ? 1 : -1;
    }

    DEVICE void next() {
        if (CAUSAL) {
            if (++head == end_head) head = first_head, tile += by;
        } else if (--tile < 0) {
            tile = first_tile, ++head;
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    // of dO, which may have one stage: two steps then are the two parities
    DEVICE int grad_out_stage() const { return GRAD_OUT_STAGES == 1 ? 0 : stage; }
    DEVICE int grad_out_parity() const { return GRAD_OUT_STAGES == 1 ? stage : parity; }
};

// Loads, by one thread

DEVICE void load(const Backward& args, const Work& work, unsigned memory) {
    Step step(args, work);
    for (int i = 0; i < work.steps; ++i, step.next()) {
        int row = step.tile * QUERIES;
        long long number = (long long)work.batch * args.num_heads + step.head;
        number = number * args.query_tiles * QUERIES + row;
        // Q and its log-sum-exp
        unsigned full = memory + Q_FULL + 8 * step.stage;
        wait(memory + Q_EMPTY + 8 * step.stage, step.parity ^ 1);
        arrive_and_expect(full, TILES * QUERY_TILE + QUERIES * 4);
        load_tiles(memory + Q_AT + step.stage * TILES * QUERY_TILE, args.q, QUERIES, row, step.head,
                   work.batch, full);
        load_bytes(memory + LSE_AT + step.stage * QUERIES * 4, args.lse_log2 + number, QUERIES * 4,
                   full);
        // K and V, once
        if (i == 0) {
            int key = work.key_tile * KEYS;
            arrive_and_expect(memory + K_FULL, TILES * KEY_TILE);
            load_tiles(memory + K_AT, args.k, KEYS, key, work.key_head, work.batch, memory + K_FULL);
            arrive_and_expect(memory + V_FULL, TILES * KEY_TILE);
            load_tiles(memory + V_AT, args.v, KEYS, key, work.key_head, work.batch, memory + V_FULL);
        }
        // dO and delta
        int stage = step.grad_out_stage();
        full = memory + GRAD_OUT_FULL + 8 * stage;
        wait(memory + GRAD_OUT_EMPTY + 8 * stage, step.grad_out_parity() ^ 1);
        arrive_and_expect(full, TILES * QUERY_TILE + QUERIES * 4);
        load_tiles(memory + GRAD_OUT_AT + stage * TILES * QUERY_TILE, args.grad_out, QUERIES, row,
                   step.head, work.batch, full);
        load_bytes(memory + DELTA_AT + stage * QUERIES * 4, args.delta + number, QUERIES * 4, full);
    }
}

// Additions to the sums of dQ, by a warp in one step and by another in the next, whose first lanes start
// the copies: one can wait for its turn before the other has passed on its own.

DEVICE int place_of_piece(int stage, int piece) {
    return (GRAD_Q_STAGES == 1 ? 0 : stage) * READERS + piece;
}
DEVICE unsigned piece_at(unsigned memory, int place) { return memory + GRAD_Q_AT + place * PIECE_BYTES; }

DEVICE void empty_pieces(int stage) {
    for (int piece = 0; piece < READERS; ++piece)
        announce(PIECE_EMPTY + place_of_piece(stage, piece), WARPGROUP + 32);
}

DEVICE void add_grad_q(const Backward& args, const Work& work, unsigned memory, int own_stage) {
    Step step(args, work);
    if (own_stage < GRAD_Q_STAGES) empty_pieces(own_stage);
    for (int i = 0; i < work.steps; ++i, step.next()) {
        if (step.stage != own_stage) continue;
        long long number = (long long)work.batch * args.num_heads + step.head;
        number = number * args.query_tiles + step.tile;
        int turn = work.turn(args, step.tile);
        if (args.turns && lane() == 0) wait_for_turn(args.turns + number, turn);
        __syncwarp();
        for (int piece = 0; piece < READERS; ++piece) {
            meet(PIECE_FULL + own_stage * READERS + piece, WARPGROUP + 32);
            if (lane() == 0) {
                add_bytes(args.sums + number * QUERIES * DIM + piece * PIECE,
                          piece_at(memory, place_of_piece(own_stage, piece)),
                          64 * columns_of_piece(piece) * 4);
                end_copies();
            }
            __syncwarp();
        }
        if (lane() == 0) wait_until_read<0>();
        __syncwarp();
        empty_pieces(own_stage);
        if (args.turns && lane() == 0) {
            wait_until_written();
            pass_turn(args.turns + number, turn + 1);
        }
    }
}

// The gradient of 64 rows before RoPE, from that after it; pairs are neighbors.
template <int N>
DEVICE void unrotate(float (&x)[N][4], const Backward& args, int first_row, int first_column,
                     int num_rows) {
    int half_dim = args.head_dim / 2;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = first_row + 16 * warp_of_four() + lane() / 4 + 8 * r;
            int pair = first_column / 2 + 4 * i + lane() % 4;
            if (row >= num_rows || pair >= half_dim) continue;
            float cos = args.cos[(long long)row * half_dim + pair];
            float sin = args.sin[(long long)row * half_dim + pair];
            float even = x[i][2 * r], odd = x[i][2 * r + 1];
            x[i][2 * r] = even * cos + odd * sin;
            x[i][2 * r + 1] = odd * cos - even * sin;
        }
}

// Matmuls and what goes with them

// Scores that the mask hides, and those past the last query or key, become -inf. Rows are queries and
// columns keys, or the other way round.
template <bool ROWS_ARE_KEYS, int M>
DEVICE void hide(float (&scores)[M][4], int first_row, int first_column, const Backward& args) {
    int own_row = first_row + 16 * warp_of_four() + lane() / 4;
    int own_column = first_column + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int row = own_row + j / 2 * 8, column = own_column + 8 * i + j % 2;
            int query = ROWS_ARE_KEYS ? column : row, key = ROWS_ARE_KEYS ? row : column;
            bool is_visible = key < args.num_keys && query < args.num_queries;
            if (CAUSAL) is_visible &= key <= query;
            if (!is_visible) scores[i][j] = -INFINITE;
        }
}

// Store 16-bit results transposed: their columns are rows of a tile, whose 64 columns are the rows of the
// warpgroup's results. Each lane stores eight neighbors.
template <int M>
DEVICE void store_transposed(const unsigned (&x)[M][4], unsigned tile) {
    int row = lane() / 16 * 8 + lane() % 8, chunk = (2 * warp_of_four() + lane() / 8 % 2) ^ row % 8;
#pragma unroll
    for (int i = 0; i < M; ++i)
        store_matrices_transposed(tile + (i * 16 + row) * ROW_BYTES + chunk * 16, x[i]);
}

// Leave dQ for the copy engine, from this piece on.
template <int M>
DEVICE void hand_over(float (&grad_q)[M][4], unsigned memory, int stage, int piece) {
    keep(grad_q);
#pragma unroll
    for (int first = 0; first < M; first += COLUMNS / 8, ++piece) {
        int place = place_of_piece(stage, piece);
        unsigned own = piece_at(memory, place) + threadIdx.x % WARPGROUP * 16;
        meet(PIECE_EMPTY + place, WARPGROUP + 32);
#pragma unroll
        for (int i = 0; i < COLUMNS / 8 && first + i < M; ++i)
            store_four(own + i * WARPGROUP * 16, grad_q[first + i]);
        publish_stores();
        announce(PIECE_FULL + stage * READERS + piece, WARPGROUP + 32);
    }
}

// The barriers that loads and their readers meet at, by one thread
DEVICE void make_load_barriers(unsigned memory) {
    make_barrier(memory + K_FULL, 1);
    make_barrier(memory + V_FULL, 1);
    for (int i = 0; i < STAGES; ++i) {
        make_barrier(memory + Q_FULL + 8 * i, 1);
        // every warp that reads
        make_barrier(memory + Q_EMPTY + 8 * i, READERS * 4);
    }
    for (int i = 0; i < GRAD_OUT_STAGES; ++i) {
        make_barrier(memory + GRAD_OUT_FULL + 8 * i, 1);
        make_barrier(memory + GRAD_OUT_EMPTY + 8 * i, READERS * 4);
    }
}

// Before: delta, the log-sum-exp in base 2, and zeros to add to. 64 queries of a head a block, 16 bytes of
// a row a thread.
constexpr int ROW_LANES = TILES > 2 ? 32 : TILES * COLUMNS / 8;

extern "C" __global__ void __launch_bounds__(WARPGROUP) prepare(const __grid_constant__ Backward args) {
    int blocks = args.query_tiles * QUERIES / 64;  // of a head
    int first = blockIdx.x % blocks * 64, batch_head = blockIdx.x / blocks;
    int batch = batch_head / args.num_heads, head = batch_head % args.num_heads;
    const Rows &out = args.out, &grad_out = args.grad_out_rows;
    const unsigned short* out_row = out.data + batch * out.batch + head * out.head;
    const unsigned short* grad_out_row = grad_out.data + batch * grad_out.batch + head * grad_out.head;
    int column = threadIdx.x % ROW_LANES * 8;
#pragma unroll
    for (int i = 0; i < 64; i += WARPGROUP / ROW_LANES) {
        int row = first + i + threadIdx.x / ROW_LANES;
        bool is_inside = row < args.num_queries;
        float delta = 0;
        if (is_inside && column < args.head_dim) {
            uint4 a = *(const uint4*)(out_row + row * out.token + column);
            uint4 b = *(const uint4*)(grad_out_row + row * grad_out.token + column);
            unsigned x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                delta += unpack(x[j]).x * unpack(y[j]).x + unpack(x[j]).y * unpack(y[j]).y;
        }
#pragma unroll
        for (int distance = ROW_LANES / 2; distance; distance /= 2)
            delta += __shfl_xor_sync(WHOLE_WARP, delta, distance);
        if (column) continue;
        // an infinite log-sum-exp makes every probability 0: past the last query, and for a query
        // whose scores are all -inf
        float lse = is_inside ? args.lse[(long long)batch_head * args.num_queries + row] : INFINITE;
        long long place = (long long)batch_head * args.query_tiles * QUERIES + row;
        args.lse_log2[place] = lse == -INFINITE ? INFINITE : lse * LOG2_E;
        args.delta[place] = delta;
    }
    if (args.turns && threadIdx.x == 0 && first % QUERIES == 0)
        args.turns[(long long)batch_head * args.query_tiles + first / QUERIES] = 0;
    float4* sums = (float4*)args.sums + (long long)blockIdx.x * (64 * DIM / 4);
#pragma unroll
    for (int i = threadIdx.x; i < 64 * DIM / 4; i += WARPGROUP) sums[i] = float4{};
}

// After: dQ from its sums. 64 queries and 64 columns of a head a block.
extern "C" __global__ void __launch_bounds__(WARPGROUP) finish(const __grid_constant__ Backward args) {
    int blocks = args.query_tiles * QUERIES / 64;  // of 64 queries of a head
    int column = blockIdx.x % TILES * COLUMNS;
    int row = blockIdx.x / TILES % blocks * 64, batch_head = blockIdx.x / TILES / blocks;
    if (row >= args.num_queries) return;
    const float4* sums =
        (const float4*)(args.sums + (long long)(blockIdx.x / TILES) * 64 * DIM + 64 * column);
    float grad_q[COLUMNS / 8][4];
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
        float4 x = column + 8 * i < DIM ? sums[i * WARPGROUP + threadIdx.x] : float4{};
        grad_q[i][0] = x.x, grad_q[i][1] = x.y, grad_q[i][2] = x.z, grad_q[i][3] = x.w;
    }
    scale_by(grad_q, args.scale);
    if (ROPE) unrotate(grad_q, args, row, column, args.num_queries);
    store_rows(grad_q, args.grad_q, row, column, batch_head % args.num_heads,
               batch_head / args.num_heads, shared_memory(), 0, OUTPUT_WRITTEN);
    if (threadIdx.x == 0) wait_until_read<0>();
}
