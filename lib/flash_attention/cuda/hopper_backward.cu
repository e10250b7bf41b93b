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
// same dQ. Its float32 sums are in memory: a piece of a part is left in shared memory, and the copy engine
// adds it.
//
// Blocks can take turns at dQ, so that results repeat to the bit: see hopper_backward.cuh. Heads of more
// than 128 have hopper_backward_wide.cu.
//
// With heads of more than 96 each of the warpgroups computes half of the part, so they wait for each
// other in every step. With fewer columns, where exponentials take longer for the same matmuls, the
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
constexpr int GRAD_OUT_STAGES = 2, GRAD_Q_STAGES = 2;
constexpr int GRAD_S_BYTES = 2 * READERS * QUERIES * ROW_BYTES;  // two stages, a tile a warpgroup
constexpr bool APART = DIM <= 96;     // whether the second warpgroup computes all of dQ
#include <hopper_backward.cuh>

constexpr int GRAD_S_FULL = BARRIERS_END;  // of the first warpgroup, for each stage
static_assert(GRAD_S_FULL + 8 * STAGES == SHARED_BYTES, "as the host has it");

// Matmuls

constexpr int N = QUERIES / 8;  // fragments across a tile of queries
constexpr int D = DIM / 8;      // and across head_dim

// C = 64 rows of dS · columns of K
template <int M>
DEVICE void issue_grad_q(float (&c)[M][4], unsigned grad_s, unsigned k) {
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
        unsigned long long a = operand(grad_s, i / 4 * QUERY_TILE + i % 4 * 32);
        unsigned long long b = operand(k, i * 16 * ROW_BYTES, KEY_TILE);
        i ? multiply_add<1>(c, a, b) : multiply<1>(c, a, b);
    }
    end_matmuls();
}

// S becomes P.
DEVICE void exponentiate(float (&scores)[N][4], unsigned lse, float scale_log2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float2 x = load_pair(lse + 32 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            scores[i][j] = exp2_fast(scores[i][j] * scale_log2 - (j % 2 ? x.y : x.x));
    }
}

// dP becomes dS.
DEVICE void to_grad_s(float (&grad_p)[N][4], const float (&p)[N][4], unsigned delta) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float2 x = load_pair(delta + 32 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) grad_p[i][j] = p[i][j] * (grad_p[i][j] - (j % 2 ? x.y : x.x));
    }
}

// dV in place of V, and dK in place of dS, which both warpgroups have read once they are here
DEVICE void store_grads(float (&grad_k)[D][4], const float (&grad_v)[D][4], const Backward& args,
                        const Work& work, unsigned memory, int part) {
    int first_key = work.key_tile * KEYS + part * OWN_KEYS;
    scale_by(grad_k, args.scale);
    if (ROPE) unrotate(grad_k, args, first_key, 0, args.num_keys);
    store_rows(grad_v, args.grad_v, first_key, 0, work.key_head, work.batch,
               memory + V_AT + part * OWN_KEYS * ROW_BYTES, KEY_TILE, OUTPUT_WRITTEN + part);
    meet(P_WRITTEN, READERS * WARPGROUP);
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
        meet(P_WRITTEN, READERS * WARPGROUP);
    } else if (PART == 0) {
        release(memory + GRAD_S_FULL + 8 * step.stage);
    } else {
        meet(GRAD_S_WRITTEN, WARPGROUP);
        wait(memory + GRAD_S_FULL + 8 * step.stage, step.parity);
    }
}

template <int PART>
DEVICE void multiply_all(const Backward& args, const Work& work, unsigned memory) {
    // matmuls for dQ, of 64 queries each
    constexpr int GRAD_QS = APART && PART == 0 ? 0 : QUERIES / 64, GRAD_Q_COLUMNS = APART ? DIM : COLUMNS;
    int first_key = work.key_tile * KEYS + PART * OWN_KEYS;
    unsigned k = memory + K_AT + PART * OWN_KEYS * ROW_BYTES;
    unsigned v = memory + V_AT + PART * OWN_KEYS * ROW_BYTES;
    unsigned k_columns = memory + K_AT + (APART ? 0 : PART * KEY_TILE);

    float grad_k[D][4], grad_v[D][4], grad_q[GRAD_QS ? GRAD_QS : 1][GRAD_Q_COLUMNS / 8][4];
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
        issue_transposed<KEY_TILE, QUERY_TILE>(scores, k, q);
        wait_for_matmuls<1>();
        if (i) release(memory + Q_EMPTY + 8 * (step.stage ^ 1));
        // dP, and P meanwhile
        if (i == 0) wait(memory + V_FULL, 0);
        wait(memory + GRAD_OUT_FULL + 8 * step.stage, step.parity);
        issue_transposed<KEY_TILE, QUERY_TILE>(grad_p, v, grad_out);
        wait_for_matmuls<1>();
        keep(scores);
        bool is_cut = first_key + OWN_KEYS > args.num_keys || first_query + QUERIES > args.num_queries;
        if (is_cut || (CAUSAL && first_query < first_key + OWN_KEYS - 1))
            hide<true>(scores, first_key, first_query, args);
        exponentiate(scores, own_numbers + LSE_AT, args.scale * LOG2_E);
        to_operand(p, scores);
        wait_for_matmuls<0>();
        keep(grad_p);
        to_grad_s(grad_p, scores, own_numbers + DELTA_AT);
        to_operand(grad_s, grad_p);
        store_transposed(grad_s, grad_s_tiles + PART * QUERY_TILE);
        // dV; dQ once dS is there for both warpgroups; dK, which still runs when the next step begins.
        // A matmul with an operand in registers holds the warp: whoever waits for dS hears before that.
        if (APART && PART == 0) share_grad_s<PART>(memory, step);
        issue_from_registers<QUERY_TILE>(grad_v, p, grad_out);
        if (GRAD_QS) share_grad_s<PART>(memory, step);
#pragma unroll
        for (int j = 0; j < GRAD_QS; ++j)
            issue_grad_q(grad_q[j], grad_s_tiles + j * 64 * ROW_BYTES, k_columns);
        issue_from_registers<QUERY_TILE>(grad_k, grad_s, q);
        wait_for_matmuls<1>();
        keep(p);
        release(memory + GRAD_OUT_EMPTY + 8 * step.stage);
#pragma unroll
        for (int j = 0; j < GRAD_QS; ++j) hand_over(grad_q[j], memory, step.stage, APART ? j : PART);
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
        make_load_barriers(memory);
        for (int i = 0; i < STAGES; ++i) make_barrier(memory + GRAD_S_FULL + 8 * i, 4);
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
