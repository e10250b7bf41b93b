// FlashAttention's forward pass for Hopper GPUs (Shah et al. 2024, FlashAttention-3), for heads whose
// size is no power of two, or 64 under a causal mask: tiles have as many columns as matmuls need, and as
// many keys as fit.
//
// A block has 64 queries of a head for each of READERS warpgroups, and goes through the keys that they
// see, KEYS at a time, the last ones first:
//
//     S = Q Kᵀ         P = exp(S - max)         O = O · shrink + P V
//
// The next tile's S is issued before this tile's P V, so that tensor cores have work while S is waited
// for. The assembler moves the exponentials behind the wait for P V: they run under the matmuls of the
// other warpgroups. P is in the registers where the second matmul needs it, as its left operand. A warp
// of one more warpgroup loads tiles.
//
// BLOCKS blocks share a multiprocessor. For short sequences three with a single reader each are faster
// than one with three: nobody waits for another's loads, or for its output to leave.
#include <hopper_tiles.cuh>

constexpr int QUERIES = 64;   // of a warpgroup
constexpr float GROWTH = 8;   // by which a row's maximum may grow, in base 2, before sums are rescaled

// Shared memory: tiles of 64 columns, then barriers. The output leaves through the place of Q.
constexpr int QUERY_TILE = QUERIES * ROW_BYTES, KEY_TILE = KEYS * ROW_BYTES;  // bytes
constexpr int Q_AT = 0;                                     // for each warpgroup
constexpr int K_AT = Q_AT + READERS * TILES * QUERY_TILE;   // for each stage
constexpr int V_AT = K_AT + STAGES * TILES * KEY_TILE;      // for each stage
constexpr int Q_FULL = V_AT + STAGES * TILES * KEY_TILE, Q_EMPTY = Q_FULL + 8 * READERS;
constexpr int K_FULL = Q_EMPTY + 8 * READERS, K_EMPTY = K_FULL + 8 * STAGES;
constexpr int V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES;
static_assert(V_EMPTY + 8 * STAGES == SHARED_BYTES, "as the host has it");

// Named barriers; those of a warpgroup have its number added
enum { OUTPUT_FREE = 1, OUTPUT_WRITTEN = 4, TURN = 7 };

struct Forward {
    TensorMap q, k, v, out;
    float* lse;            // (batch, heads, queries)
    const int* work_list;  // of each block, as `schedule_tiles` makes it; null: a block, an item
    int num_heads, group, num_queries, num_keys;
    int query_tiles;       // of READERS · 64 queries, of a head
    int all_heads;         // of all sequences
    int section;           // of these heads, those worked on at a time
    float scale;
};

// Items of work: tiles of queries. A block stays on its multiprocessor for many of them.
DEVICE int num_own_items(const Forward& args) {
    return args.work_list ? args.work_list[blockIdx.x] : 1;
}

// The tiles of keys that queries up to the last one see.
DEVICE int key_tiles_seen(const Forward& args, int last_query) {
    int end = CAUSAL ? min(args.num_keys, last_query + 1) : args.num_keys;
    return (end + KEYS - 1) / KEYS;
}

// An item. They go through the heads in sections whose keys and values fit the L2 cache; within a
// section, through the tiles of all its heads, those with the most work first.
struct Work {
    int batch, head;
    int first_query;  // below 0 in a first tile that is not whole
    int loaded;       // tiles of keys

    DEVICE Work(const Forward& args, int index) {
        int item = args.work_list ? args.work_list[(index + 1) * gridDim.x + blockIdx.x] : blockIdx.x;
        int first_head = item / (args.section * args.query_tiles) * args.section;
        int heads = min(args.section, args.all_heads - first_head);
        item -= first_head * args.query_tiles;
        batch = (first_head + item % heads) / args.num_heads;
        head = (first_head + item % heads) % args.num_heads;
        first_query = item / heads * READERS * QUERIES;
        // under a mask the last tile has the most work: it comes first and is a whole one
        if (CAUSAL) {
            int end = (args.num_queries + QUERIES - 1) / QUERIES * QUERIES;
            first_query = end - READERS * QUERIES - first_query;
        }
        loaded = key_tiles_seen(args, min(first_query + READERS * QUERIES, args.num_queries) - 1);
    }
};

// The place in the rings of K and V: a stage, and how often it has been used
struct Step {
    int stage = 0, parity = 0;

    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Loads, by one thread

DEVICE void load_keys(const Forward& args, const TensorMap& map, const Work& work, int key_tile,
                      unsigned tiles, unsigned full, unsigned empty, const Step& step) {
    wait(empty + 8 * step.stage, step.parity ^ 1);
    arrive_and_expect(full + 8 * step.stage, TILES * KEY_TILE);
    load_tiles(tiles + step.stage * TILES * KEY_TILE, map, KEYS, key_tile * KEYS,
               work.head / args.group, work.batch, full + 8 * step.stage);
}

DEVICE void load(const Forward& args, const Work& work, unsigned memory, Step& step, int index) {
    Step values = step;  // one tile behind the keys
    for (int i = 0; i <= work.loaded; ++i) {
        if (i < work.loaded) {
            load_keys(args, args.k, work, work.loaded - 1 - i, memory + K_AT, memory + K_FULL,
                      memory + K_EMPTY, step);
            step.next();
        }
        for (int part = 0; i == 0 && part < READERS; ++part) {
            unsigned full = memory + Q_FULL + 8 * part;
            wait(memory + Q_EMPTY + 8 * part, index & 1 ^ 1);
            arrive_and_expect(full, TILES * QUERY_TILE);
            load_tiles(memory + Q_AT + part * TILES * QUERY_TILE, args.q, QUERIES,
                       work.first_query + part * QUERIES, work.head, work.batch, full);
        }
        if (i > 0) {
            load_keys(args, args.v, work, work.loaded - i, memory + V_AT, memory + V_FULL,
                      memory + V_EMPTY, values);
            values.next();
        }
    }
}

// Matmuls

constexpr int N = KEYS / 8;  // fragments across a tile of keys
constexpr int D = DIM / 8;   // and across a head

// Scores that the mask hides, and those past the last key, become -inf.
DEVICE void hide(float (&scores)[N][4], int first_query, int first_key, const Forward& args) {
    int own_query = first_query + 16 * warp_of_four() + lane() / 4;
    int own_key = first_key + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int key = own_key + 8 * i + j % 2, query = own_query + j / 2 * 8;
            if (key >= args.num_keys || (CAUSAL && key > query)) scores[i][j] = -INFINITE;
        }
}

// Of the two rows of a lane, and of its numbers only until all four lanes of a row are asked
struct Rows {
    float max[2], sum[2];

    // a finite lower bound, as -inf - -inf would be NaN where all scores are -inf
    DEVICE Rows() { max[0] = max[1] = -3e38f, sum[0] = sum[1] = 0; }
};

DEVICE float max_of_lanes(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}

DEVICE float sum_of_lanes(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// Online softmax, in base 2: S becomes P, and `shrink` what earlier sums are to be multiplied with.
DEVICE void exponentiate(float (&scores)[N][4], Rows& rows, float (&shrink)[2], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // two chains, since each step waits for the one before
        float top[2] = {scores[0][2 * r], scores[0][2 * r + 1]};
#pragma unroll
        for (int i = 1; i < N; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) top[j] = fmaxf(top[j], scores[i][2 * r + j]);
        float max = max_of_lanes(fmaxf(top[0], top[1])) * scale_log2;
        if (max <= rows.max[r] + GROWTH) max = rows.max[r];
        shrink[r] = exp2_fast(rows.max[r] - max);
        rows.max[r] = max;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum[2] = {};
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& x = scores[i][2 * r + j];
                x = exp2_fast(x * scale_log2 - rows.max[r]);
                sum[j] += x;
            }
        rows.sum[r] = rows.sum[r] * shrink[r] + (sum[0] + sum[1]);
    }
}

DEVICE void scale_rows(float (&x)[D][4], const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < D; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] *= factors[j / 2];
}

// Divide by the sums, and write the output and the log-sum-exp.
DEVICE void store_output(float (&out)[D][4], const Rows& rows, const Forward& args, const Work& work,
                         unsigned q, int first_query, int part) {
    float share[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = sum_of_lanes(rows.sum[r]);
        int query = first_query + 16 * warp_of_four() + lane() / 4 + 8 * r;
        long long head = (long long)work.batch * args.num_heads + work.head;
        if (lane() % 4 == 0 && query < args.num_queries)
            args.lse[head * args.num_queries + query] = rows.max[r] * LN_2 + logf(sum);
        // zeros, and not NaN, for a query whose scores are all -inf
        share[r] = sum == 0 ? 1 : 1 / sum;
    }
    scale_rows(out, share);
    meet(OUTPUT_FREE + part, WARPGROUP);
    store_rows(out, args.out, first_query, 0, work.head, work.batch, q, QUERY_TILE,
               OUTPUT_WRITTEN + part);
}

// This tile's scores, once they are there, become weights.
DEVICE void weigh(float (&scores)[N][4], Rows& rows, float (&shrink)[2], const Forward& args,
                  int first_query, int key_tile) {
    int end = (key_tile + 1) * KEYS;
    if (end > args.num_keys || (CAUSAL && end - 1 > first_query))
        hide(scores, first_query, key_tile * KEYS, args);
    exponentiate(scores, rows, shrink, args.scale * LOG2_E);
}

// Warpgroups take turns in issuing the matmuls of a tile.
DEVICE void wait_for_turn(int part) {
    if (ORDERED) meet(TURN + part, 2 * WARPGROUP);
}
DEVICE void pass_turn(int part) {
    if (ORDERED) announce(TURN + (part + 1) % READERS, 2 * WARPGROUP);
}

// The output of 64 queries, which see `seen` tiles of keys.
DEVICE void attend(const Forward& args, const Work& work, unsigned memory, Step& step, int seen,
                   int part) {
    int first_query = work.first_query + part * QUERIES;
    unsigned q = memory + Q_AT + part * TILES * QUERY_TILE;
    unsigned k = memory + K_AT, v = memory + V_AT;
    float out[D][4], scores[N][4], shrink[2];
    unsigned p[N / 2][4];
    Rows rows;
    set_zero(out);

    // the weights of the first tile
    wait(memory + K_FULL + 8 * step.stage, step.parity);
    issue_transposed<QUERY_TILE, KEY_TILE>(scores, q, k + step.stage * TILES * KEY_TILE);
    wait_for_matmuls<0>();
    keep(scores);
    release(memory + K_EMPTY + 8 * step.stage);
    weigh(scores, rows, shrink, args, first_query, seen - 1);
    to_operand(p, scores);

    for (int key_tile = seen - 2; key_tile >= 0; --key_tile) {
        // issue the next tile's scores, then this tile's weights times values
        Step values = step;
        step.next();
        wait(memory + K_FULL + 8 * step.stage, step.parity);
        wait_for_turn(part);
        issue_transposed<QUERY_TILE, KEY_TILE>(scores, q, k + step.stage * TILES * KEY_TILE);
        if (__any_sync(WHOLE_WARP, shrink[0] != 1 || shrink[1] != 1)) scale_rows(out, shrink);
        wait(memory + V_FULL + 8 * values.stage, values.parity);
        keep(out);
        issue_from_registers<KEY_TILE>(out, p, v + values.stage * TILES * KEY_TILE);
        pass_turn(part);
        // the next tile's weights; the second matmul runs
        wait_for_matmuls<1>();
        keep(scores);
        release(memory + K_EMPTY + 8 * step.stage);
        weigh(scores, rows, shrink, args, first_query, key_tile);
        wait_for_matmuls<0>();
        keep(out);
        keep(p);
        release(memory + V_EMPTY + 8 * values.stage);
        to_operand(p, scores);
    }

    // the last tile's weights times values
    scale_rows(out, shrink);
    wait(memory + V_FULL + 8 * step.stage, step.parity);
    keep(out);
    issue_from_registers<KEY_TILE>(out, p, v + step.stage * TILES * KEY_TILE);
    wait_for_matmuls<0>();
    keep(out);
    release(memory + V_EMPTY + 8 * step.stage);
    step.next();
    store_output(out, rows, args, work, q, first_query, part);
}

// The items of a warpgroup that multiplies.
DEVICE void attend_items(const Forward& args, unsigned memory, int part) {
    int num_items = num_own_items(args);
    Step step;
    if (part == READERS - 1) pass_turn(part);
    for (int i = 0; i < num_items; ++i) {
        Work work(args, i);
        int first_query = work.first_query + part * QUERIES, seen = 0;
        if (first_query >= 0 && first_query < args.num_queries)
            seen = min(key_tiles_seen(args, first_query + QUERIES - 1), work.loaded);
        // the tiles of keys that only other warpgroups see
        for (int tile = seen; tile < work.loaded; ++tile, step.next()) {
            wait(memory + K_FULL + 8 * step.stage, step.parity);
            release(memory + K_EMPTY + 8 * step.stage);
            wait(memory + V_FULL + 8 * step.stage, step.parity);
            release(memory + V_EMPTY + 8 * step.stage);
            if (tile == 0) continue;
            wait_for_turn(part);
            pass_turn(part);
        }
        wait(memory + Q_FULL + 8 * part, i & 1);
        if (seen)
            attend(args, work, memory, step, seen, part);
        else
            meet(OUTPUT_FREE + part, WARPGROUP);
        if (threadIdx.x % WARPGROUP == 0) {
            wait_until_read<0>();
            arrive(memory + Q_EMPTY + 8 * part);
        }
    }
}

// Registers of a thread at the start, and then of one that multiplies
constexpr int WARPGROUPS = READERS + 1, LOADER_REGISTERS = 24;
constexpr int REGISTERS = 65536 / (BLOCKS * WARPGROUPS * WARPGROUP) / 8 * 8;
constexpr int READER_REGISTERS = (REGISTERS * WARPGROUPS - LOADER_REGISTERS) / READERS / 8 * 8;

extern "C" __global__ void __launch_bounds__(WARPGROUPS * WARPGROUP, BLOCKS)
    forward(const __grid_constant__ Forward args) {
    unsigned memory = shared_memory();
    if (threadIdx.x == 0) {
        for (int i = 0; i < READERS; ++i) {
            make_barrier(memory + Q_FULL + 8 * i, 1);
            make_barrier(memory + Q_EMPTY + 8 * i, 1);
        }
        // every warp that reads
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(memory + K_FULL + 8 * i, 1);
            make_barrier(memory + V_FULL + 8 * i, 1);
            make_barrier(memory + K_EMPTY + 8 * i, READERS * 4);
            make_barrier(memory + V_EMPTY + 8 * i, READERS * 4);
        }
        publish_barriers();
    }
    __syncthreads();
    // the same in all lanes, as the compiler now knows
    int warp = __shfl_sync(WHOLE_WARP, threadIdx.x / 32, 0);
    if (warp < 4) {
        give_up_registers<LOADER_REGISTERS>();
        if (warp == 0 && lane() == 0) {
            int num_items = num_own_items(args);
            Step step;
            for (int i = 0; i < num_items; ++i) load(args, Work(args, i), memory, step, i);
        }
    } else {
        take_registers<READER_REGISTERS>();
        attend_items(args, memory, warp / 4 - 1);
    }
}
