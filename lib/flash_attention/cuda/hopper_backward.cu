// FlashAttention's backward pass for Hopper GPUs, in one kernel with five matmuls (Dao 2023, Algorithm
// 2; warps with different tasks and asynchronous matmuls as in FlashAttention-3, Shah et al. 2024).
//
// A block has 128 keys of a head, and goes through the queries that see them, QUERIES at a time:
//
//     Sᵀ = K Qᵀ         P = exp(S - lse)
//     dPᵀ = V dOᵀ       dS = P ∘ (dP - delta)
//     dV += Pᵀ dO       dK += dSᵀ Q       dQ += dS K
//
// Two warpgroups multiply. Each computes the 64 rows of Sᵀ and dPᵀ of its own keys: Pᵀ and dSᵀ are then
// in the registers where dV and dK, which stay in registers too, need them as left operands. A part of
// dQ needs the dS of all 128 keys, so dS goes through shared memory. Blocks of other keys add to the
// same dQ. Its float32 sums are in memory: a half of a part is left in shared memory, and the copy engine
// adds it.
//
// Sums of floating-point numbers depend on their order. So that they are the same in every run, blocks
// take turns at each tile of dQ, in the order in which they start: see `Work` and `Step`.
//
// With heads of more than 64 each of the warpgroups computes half of the part, so they wait for each
// other in every step. With heads of 64, where exponentials take longer for the same matmuls, the
// second one computes all of it, and the first never waits for the second: they come apart, and the
// exponentials of one run under the matmuls of the other.
//
// A third warpgroup does not multiply: one of its warps loads tiles, two others start the additions.
//
// `prepare` comes first, and `finish` turns the sums into dQ.
#include <hopper_tiles.cuh>

constexpr int KEYS = 128;             // of a block
constexpr int OWN_KEYS = 64;          // of a warpgroup
constexpr int READERS = 2;            // warpgroups that multiply
constexpr int STAGES = 2;             // tiles of Q, dO, dS and dQ in shared memory at a time
constexpr bool APART = TILES == 1;     // whether the second warpgroup computes all of dQ

// A warpgroup's half of a part of dQ: 64 of 128 queries, or 64 of 128 columns
constexpr int HALF_BYTES = 64 * COLUMNS * 4;
static_assert(QUERIES * TILES == 2 * 64, "two halves");

// Shared memory: tiles of 64 columns, halves of dQ, numbers of queries, barriers
constexpr int KEY_TILE = KEYS * ROW_BYTES, QUERY_TILE = QUERIES * ROW_BYTES;  // bytes
constexpr int K_AT = 0;
constexpr int V_AT = K_AT + TILES * KEY_TILE;
constexpr int Q_AT = V_AT + TILES * KEY_TILE;                         // for each stage
constexpr int GRAD_OUT_AT = Q_AT + STAGES * TILES * QUERY_TILE;       // for each stage
constexpr int GRAD_S_AT = GRAD_OUT_AT + STAGES * TILES * QUERY_TILE;  // for each stage and warpgroup
constexpr int GRAD_Q_AT = GRAD_S_AT + STAGES * READERS * QUERY_TILE;  // for each stage and warpgroup
constexpr int LSE_AT = GRAD_Q_AT + STAGES * READERS * HALF_BYTES;     // for each stage
constexpr int DELTA_AT = LSE_AT + STAGES * QUERIES * 4;               // for each stage
constexpr int K_FULL = DELTA_AT + STAGES * QUERIES * 4, V_FULL = K_FULL + 8;
constexpr int Q_FULL = V_FULL + 8, Q_EMPTY = Q_FULL + 8 * STAGES;
constexpr int GRAD_OUT_FULL = Q_EMPTY + 8 * STAGES, GRAD_OUT_EMPTY = GRAD_OUT_FULL + 8 * STAGES;
constexpr int GRAD_S_FULL = GRAD_OUT_EMPTY + 8 * STAGES;  // of the first warpgroup
static_assert(GRAD_S_FULL + 8 * STAGES == SHARED_BYTES, "as the host has it");

// Named barriers. OUTPUT_WRITTEN has the warpgroup's number added, those of halves of dQ 2 · stage + half.
enum { BOTH = 1, GRAD_S_WRITTEN = 2, OUTPUT_WRITTEN = 3, HALF_EMPTY = 5, HALF_FULL = 9 };

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
    float* sums;             // of dQ: (batch, heads, query_tiles · QUERIES / 64, TILES, 64 · 64)
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
// Where blocks take turns under a mask, this is how the last section goes. In the others those with the
// least work come first: blocks that start together then come to a tile of dQ one after the other.
struct Work {
    int batch, key_head, key_tile;
    int first_tile;  // of the queries that see the keys
    int steps;       // tiles of queries of all heads of the group
    bool is_reversed;

    DEVICE Work(const Backward& args) {
        int first_head = blockIdx.x / (args.section * args.key_tiles) * args.section;
        int heads = min(args.section, args.key_heads - first_head);
        int number = blockIdx.x - first_head * args.key_tiles;  // in the section
        is_reversed = CAUSAL && args.turns && first_head + heads < args.key_heads;
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
        return min(query_tile * QUERIES / KEYS, args.key_tiles - 1) - key_tile;
    }
};

// The steps of a block: the heads of its group, and of each head the tiles of queries, the last one first;
// if reversed, the first one.
struct Step {
    int start, end, by;  // tiles
    int head, tile;
    int stage = 0, parity = 0;

    DEVICE Step(const Backward& args, const Work& work) {
        start = args.query_tiles - 1, end = work.first_tile - 1, by = -1;
        if (work.is_reversed) start = work.first_tile, end = args.query_tiles, by = 1;
        head = work.key_head * args.group, tile = start;
    }

    DEVICE void next() {
        tile += by;
        if (tile == end) tile = start, ++head;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
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
        full = memory + GRAD_OUT_FULL + 8 * step.stage;
        wait(memory + GRAD_OUT_EMPTY + 8 * step.stage, step.parity ^ 1);
        arrive_and_expect(full, TILES * QUERY_TILE + QUERIES * 4);
        load_tiles(memory + GRAD_OUT_AT + step.stage * TILES * QUERY_TILE, args.grad_out, QUERIES, row,
                   step.head, work.batch, full);
        load_bytes(memory + DELTA_AT + step.stage * QUERIES * 4, args.delta + number, QUERIES * 4,
                   full);
    }
}

// Additions to the sums of dQ, of each stage by a warp, whose first lane starts the copies

// The number of a stage's half, and its place.
DEVICE int half_number(int stage, int half) { return stage * READERS + half; }
DEVICE unsigned half_place(unsigned memory, int number) {
    return memory + GRAD_Q_AT + number * HALF_BYTES;
}

DEVICE void empty_halves(int stage) {
    for (int half = 0; half < READERS; ++half)
        announce(HALF_EMPTY + half_number(stage, half), WARPGROUP + 32);
}

DEVICE void add_grad_q(const Backward& args, const Work& work, unsigned memory, int own_stage) {
    Step step(args, work);
    empty_halves(own_stage);
    for (int i = 0; i < work.steps; ++i, step.next()) {
        if (step.stage != own_stage) continue;
        long long number = (long long)work.batch * args.num_heads + step.head;
        number = number * args.query_tiles + step.tile;
        int turn = work.turn(args, step.tile);
        if (args.turns && lane() == 0) wait_for_turn(args.turns + number, turn);
        __syncwarp();
        for (int half = 0; half < READERS; ++half) {
            meet(HALF_FULL + half_number(own_stage, half), WARPGROUP + 32);
            if (lane() == 0) {
                add_bytes(args.sums + (number * READERS + half) * (HALF_BYTES / 4),
                          half_place(memory, half_number(own_stage, half)), HALF_BYTES);
                end_copies();
            }
            __syncwarp();
        }
        if (lane() == 0) wait_until_read<0>();
        __syncwarp();
        empty_halves(own_stage);
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

// Matmuls

constexpr int N = QUERIES / 8;  // fragments across a tile of queries
constexpr int D = DIM / 8;      // and across head_dim

// C = 64 rows of K or V · tileᵀ
DEVICE void issue_transposed(float (&c)[N][4], unsigned rows, unsigned tile) {
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
        unsigned long long a = operand(rows, i / 4 * KEY_TILE + i % 4 * 32);
        unsigned long long b = operand(tile, i / 4 * QUERY_TILE + i % 4 * 32);
        i ? multiply_add<0>(c, a, b) : multiply<0>(c, a, b);
    }
    end_matmuls();
}

// C += operand · tile
DEVICE void issue(float (&c)[D][4], unsigned (&a)[N / 2][4], unsigned tile) {
    keep(a);
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
        multiply_add<1>(c, a[i], operand(tile, i * 16 * ROW_BYTES, QUERY_TILE));
    end_matmuls();
}

// C = 64 rows of dS · 64 columns of K
DEVICE void issue_grad_q(float (&c)[COLUMNS / 8][4], unsigned grad_s, unsigned k) {
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
        unsigned long long a = operand(grad_s, i / 4 * QUERY_TILE + i % 4 * 32);
        unsigned long long b = operand(k, i * 16 * ROW_BYTES);
        i ? multiply_add<1>(c, a, b) : multiply<1>(c, a, b);
    }
    end_matmuls();
}

// Scores that the mask hides, and those past the last query or key, become -inf.
DEVICE void hide(float (&scores)[N][4], int first_key, int first_query, const Backward& args) {
    int own_key = first_key + 16 * warp_of_four() + lane() / 4;
    int own_query = first_query + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int query = own_query + 8 * i + j % 2, key = own_key + j / 2 * 8;
            bool is_visible = key < args.num_keys && query < args.num_queries;
            if (CAUSAL) is_visible &= key <= query;
            if (!is_visible) scores[i][j] = -INFINITE;
        }
}

// S becomes P.
DEVICE void exponentiate(float (&scores)[N][4], unsigned lse, float scale_log2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float2 x = load_pair(lse + 32 * i);
        scores[i][0] = exp2_fast(scores[i][0] * scale_log2 - x.x);
        scores[i][1] = exp2_fast(scores[i][1] * scale_log2 - x.y);
        scores[i][2] = exp2_fast(scores[i][2] * scale_log2 - x.x);
        scores[i][3] = exp2_fast(scores[i][3] * scale_log2 - x.y);
    }
}

// dP becomes dS.
DEVICE void to_grad_s(float (&grad_p)[N][4], const float (&p)[N][4], unsigned delta) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float2 x = load_pair(delta + 32 * i);
        grad_p[i][0] = p[i][0] * (grad_p[i][0] - x.x);
        grad_p[i][1] = p[i][1] * (grad_p[i][1] - x.y);
        grad_p[i][2] = p[i][2] * (grad_p[i][2] - x.x);
        grad_p[i][3] = p[i][3] * (grad_p[i][3] - x.y);
    }
}

// Store this warpgroup's dS in shared memory, queries first: each lane eight keys of a query.
DEVICE void store_grad_s(const unsigned (&grad_s)[N / 2][4], unsigned tile) {
    int row = lane() / 16 * 8 + lane() % 8, chunk = (2 * warp_of_four() + lane() / 8 % 2) ^ row % 8;
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
        store_matrices_transposed(tile + (i * 16 + row) * ROW_BYTES + chunk * 16, grad_s[i]);
}

// Leave a half of a part of dQ for the copy engine.
DEVICE void hand_over(float (&grad_q)[COLUMNS / 8][4], unsigned memory, int number) {
    unsigned place = half_place(memory, number);
    keep(grad_q);
    meet(HALF_EMPTY + number, WARPGROUP + 32);
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i)
        store_four(place + (i * WARPGROUP + threadIdx.x % WARPGROUP) * 16, grad_q[i]);
    publish_stores();
    announce(HALF_FULL + number, WARPGROUP + 32);
}

// dV in place of V, and dK in place of dS, which both warpgroups have read once they are here
DEVICE void store_grads(float (&grad_k)[D][4], const float (&grad_v)[D][4], const Backward& args,
                        const Work& work, unsigned memory, int part) {
    int first_key = work.key_tile * KEYS + part * OWN_KEYS;
    scale_by(grad_k, args.scale);
    if (ROPE) unrotate(grad_k, args, first_key, 0, args.num_keys);
    store_rows(grad_v, args.grad_v, first_key, 0, work.key_head, work.batch,
               memory + V_AT + part * OWN_KEYS * ROW_BYTES, KEY_TILE, OUTPUT_WRITTEN + part);
    meet(BOTH, READERS * WARPGROUP);
    store_rows(grad_k, args.grad_k, first_key, 0, work.key_head, work.batch,
               memory + GRAD_S_AT + part * QUERY_TILE, READERS * QUERY_TILE, OUTPUT_WRITTEN + part);
    if (threadIdx.x % WARPGROUP == 0) wait_until_read<0>();
}

// dS is there for those who multiply it with K. The first warpgroup comes back to its place only after
// the second has read it: both stages of Q are taken until then.
template <int PART>
DEVICE void share_grad_s(unsigned memory, const Step& step) {
    publish_stores();
    if (!APART) {
        meet(BOTH, READERS * WARPGROUP);
    } else if (PART == 0) {
        release(memory + GRAD_S_FULL + 8 * step.stage);
    } else {
        meet(GRAD_S_WRITTEN, WARPGROUP);
        wait(memory + GRAD_S_FULL + 8 * step.stage, step.parity);
    }
}

template <int PART>
DEVICE void multiply_all(const Backward& args, const Work& work, unsigned memory) {
    constexpr int HALVES = APART ? 2 * PART : 1, FIRST_HALF = APART ? 0 : PART;  // of parts of dQ
    int first_key = work.key_tile * KEYS + PART * OWN_KEYS;
    unsigned k = memory + K_AT + PART * OWN_KEYS * ROW_BYTES;
    unsigned v = memory + V_AT + PART * OWN_KEYS * ROW_BYTES;
    // a half of dQ: some of its columns, or of its rows
    constexpr int NEXT_COLUMNS = TILES == 1 ? 0 : KEY_TILE, NEXT_ROWS = TILES == 1 ? 64 * ROW_BYTES : 0;

    float grad_k[D][4], grad_v[D][4], grad_q[HALVES ? HALVES : 1][COLUMNS / 8][4];
    float scores[N][4], grad_p[N][4];
    unsigned p[N / 2][4], grad_s[N / 2][4];
    set_zero(grad_k);
    set_zero(grad_v);
    // zeros from here on: written within the loop, they would make the assembler serialize its matmuls
    keep(grad_k);
    keep(grad_v);
    wait(memory + K_FULL, 0);
    Step step(args, work);
    for (int i = 0; i < work.steps; ++i, step.next()) {
        unsigned q = memory + Q_AT + step.stage * TILES * QUERY_TILE;
        unsigned grad_out = memory + GRAD_OUT_AT + step.stage * TILES * QUERY_TILE;
        unsigned grad_s_tiles = memory + GRAD_S_AT + step.stage * READERS * QUERY_TILE;
        unsigned own_numbers = memory + (step.stage * QUERIES + lane() % 4 * 2) * 4;
        int first_query = step.tile * QUERIES;
        // S, which runs after dK of the step before this one
        wait(memory + Q_FULL + 8 * step.stage, step.parity);
        issue_transposed(scores, k, q);
        wait_for_matmuls<1>();
        if (i) release(memory + Q_EMPTY + 8 * (step.stage ^ 1));
        // dP, and P meanwhile
        if (i == 0) wait(memory + V_FULL, 0);
        wait(memory + GRAD_OUT_FULL + 8 * step.stage, step.parity);
        issue_transposed(grad_p, v, grad_out);
        wait_for_matmuls<1>();
        keep(scores);
        bool is_cut = first_key + OWN_KEYS > args.num_keys || first_query + QUERIES > args.num_queries;
        if (is_cut || (CAUSAL && first_query < first_key + OWN_KEYS - 1))
            hide(scores, first_key, first_query, args);
        exponentiate(scores, own_numbers + LSE_AT, args.scale * LOG2_E);
        to_operand(p, scores);
        wait_for_matmuls<0>();
        keep(grad_p);
        to_grad_s(grad_p, scores, own_numbers + DELTA_AT);
        to_operand(grad_s, grad_p);
        store_grad_s(grad_s, grad_s_tiles + PART * QUERY_TILE);
        // dV; dQ once dS is there for both warpgroups; dK, which still runs when the next step begins.
        // A matmul with an operand in registers holds the warp: whoever waits for dS hears before that.
        if (APART && PART == 0) share_grad_s<PART>(memory, step);
        issue(grad_v, p, grad_out);
        if (HALVES) share_grad_s<PART>(memory, step);
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
            issue_grad_q(grad_q[h], grad_s_tiles + (FIRST_HALF + h) * NEXT_ROWS,
                         memory + K_AT + (FIRST_HALF + h) * NEXT_COLUMNS);
        issue(grad_k, grad_s, q);
        wait_for_matmuls<1>();
        keep(p);
        release(memory + GRAD_OUT_EMPTY + 8 * step.stage);
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
            hand_over(grad_q[h], memory, half_number(step.stage, FIRST_HALF + h));
    }
    wait_for_matmuls<0>();
    keep(grad_k);
    keep(grad_v);
    store_grads(grad_k, grad_v, args, work, memory, PART);
}

extern "C" __global__ void __launch_bounds__((READERS + 1) * WARPGROUP, 1)
    backward(const __grid_constant__ Backward args) {
    unsigned memory = shared_memory();
    if (threadIdx.x == 0) {
        make_barrier(memory + K_FULL, 1);
        make_barrier(memory + V_FULL, 1);
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(memory + Q_FULL + 8 * i, 1);
            make_barrier(memory + GRAD_OUT_FULL + 8 * i, 1);
            // every warp that reads
            make_barrier(memory + Q_EMPTY + 8 * i, READERS * 4);
            make_barrier(memory + GRAD_OUT_EMPTY + 8 * i, READERS * 4);
            make_barrier(memory + GRAD_S_FULL + 8 * i, 4);
        }
        publish_barriers();
    }
    __syncthreads();
    // the same in all lanes, as the compiler now knows
    int warp = __shfl_sync(WHOLE_WARP, threadIdx.x / 32, 0);
    Work work(args);
    if (warp < 4) {
        give_up_registers<24>();
        if (warp == 0 && lane() == 0) load(args, work, memory);
        if (0 < warp && warp <= STAGES) add_grad_q(args, work, memory, warp - 1);
    } else if (warp < 8) {
        take_registers<APART ? 224 : 240>();
        multiply_all<0>(args, work, memory);
    } else {
        take_registers<APART ? 256 : 240>();
        multiply_all<1>(args, work, memory);
    }
}

// Before: delta, the log-sum-exp in base 2, and zeros to add to. 64 queries of a head a block, 16 bytes of
// a row a thread.
constexpr int ROW_LANES = TILES * COLUMNS / 8;

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
    float4* sums = (float4*)args.sums + (long long)blockIdx.x * TILES * (HALF_BYTES / 16);
#pragma unroll
    for (int i = threadIdx.x; i < TILES * HALF_BYTES / 16; i += WARPGROUP) sums[i] = float4{};
}

// After: dQ from its sums. 64 queries and 64 columns of a head a block.
extern "C" __global__ void __launch_bounds__(WARPGROUP) finish(const __grid_constant__ Backward args) {
    int blocks = args.query_tiles * QUERIES / 64;  // of 64 queries of a head
    int column = blockIdx.x % TILES * COLUMNS;
    int row = blockIdx.x / TILES % blocks * 64, batch_head = blockIdx.x / TILES / blocks;
    if (row >= args.num_queries) return;
    const float4* sums = (const float4*)args.sums + (long long)blockIdx.x * (HALF_BYTES / 16);
    float grad_q[COLUMNS / 8][4];
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
        float4 x = sums[i * WARPGROUP + threadIdx.x];
        grad_q[i][0] = x.x, grad_q[i][1] = x.y, grad_q[i][2] = x.z, grad_q[i][3] = x.w;
    }
    scale_by(grad_q, args.scale);
    if (ROPE) unrotate(grad_q, args, row, column, args.num_queries);
    store_rows(grad_q, args.grad_q, row, column, batch_head % args.num_heads,
               batch_head / args.num_heads, shared_memory(), 0, OUTPUT_WRITTEN);
    if (threadIdx.x == 0) wait_until_read<0>();
}
