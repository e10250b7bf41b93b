// FlashAttention's backward pass for Hopper GPUs and heads of 129 to 192, in one kernel with five matmuls
// (Dao 2023, Algorithm 2). hopper_backward.cu has it for narrower heads.
//
// A block has 96 keys of a head, and goes through the queries that see them, 64 at a time:
//
//     S = Q Kᵀ           P = exp(S - lse)
//     dP = dO Vᵀ         dS = P ∘ (dP - delta)
//     dVᵀ += dOᵀ P       dKᵀ += Qᵀ dS       dQ += dS K
//
// dK and dV of 96 keys and 192 columns are 144 KB, more than half of all registers. Three warpgroups share
// them: each has 64 columns, transposed, so that the columns are the rows of its matmuls (a warpgroup
// multiplies 64 rows at a time, and 96 keys would be one and a half times as many). Each also has 64
// columns of dQ, and of S and dP 32 keys. So all of P and dS goes through shared memory, transposed as
// well: there it is the right operand of dVᵀ and dKᵀ as matmuls read it fastest.
//
// A fourth warpgroup loads and adds, as in hopper_backward.cu.
#include <hopper_tiles.cuh>

constexpr int KEYS = 96;              // of a block
constexpr int OWN_KEYS = 32;          // of a warpgroup, in S and dP
constexpr int READERS = 3;            // warpgroups that multiply
constexpr int GRAD_OUT_STAGES = 1, GRAD_Q_STAGES = 1;
constexpr int GRAD_S_BYTES = 2 * KEYS * ROW_BYTES;  // a tile of dSᵀ, and behind it one of Pᵀ
#include <hopper_backward.cuh>

static_assert(QUERIES == 64, "the columns of a tile");
static_assert(BARRIERS_END == SHARED_BYTES, "as the host has it");
constexpr int P_AT = GRAD_S_AT + KEY_TILE;

constexpr int N = OWN_KEYS / 8;  // fragments across a warpgroup's keys
constexpr int M = KEYS / 8;      // and across all

// C += 64 columns of Q or dO, as rows · P or dS, which lies there transposed
DEVICE void issue_by_columns(float (&c)[M][4], unsigned columns, unsigned transposed) {
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < QUERIES / 16; ++i)
        multiply_add<0, 1>(c, operand(columns, i * 16 * ROW_BYTES), operand(transposed, i * 32));
    end_matmuls();
}

// C = dS, which lies there transposed · columns of K
template <int PIECE_M>
DEVICE void issue_grad_q(float (&c)[PIECE_M][4], unsigned transposed, unsigned k) {
    begin_matmuls();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
        unsigned long long a = operand(transposed, i * 16 * ROW_BYTES);
        unsigned long long b = operand(k, i * 16 * ROW_BYTES);
        i ? multiply_add<1, 1>(c, a, b) : multiply<1, 1>(c, a, b);
    }
    end_matmuls();
}

// S becomes P. A lane has two queries, whose numbers are eight apart.
DEVICE void exponentiate(float (&scores)[N][4], unsigned lse, float scale_log2) {
    float first = load_number(lse), second = load_number(lse + 8 * 4);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            scores[i][j] = exp2_fast(scores[i][j] * scale_log2 - (j < 2 ? first : second));
}

// dP becomes dS.
DEVICE void to_grad_s(float (&grad_p)[N][4], const float (&p)[N][4], unsigned delta) {
    float first = load_number(delta), second = load_number(delta + 8 * 4);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) grad_p[i][j] = p[i][j] * (grad_p[i][j] - (j < 2 ? first : second));
}

// Round to 16 bits and leave them, transposed, for the matmuls of all warpgroups.
DEVICE void share(const float (&x)[N][4], unsigned tile, int barrier) {
    unsigned pairs[N / 2][4];
    to_operand(pairs, x);
    store_transposed(pairs, tile);
    publish_stores();
    meet(barrier, READERS * WARPGROUP);
}

// The gradient of 64 columns before RoPE, from that after it; pairs are neighboring rows here, which lanes
// have that are four apart.
DEVICE void unrotate_columns(float (&x)[M][4], const Backward& args, int first_column, int first_key) {
    int half_dim = args.head_dim / 2;
    bool is_odd = lane() / 4 % 2;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float other = __shfl_xor_sync(WHOLE_WARP, x[i][j], 4);
            int pair = (first_column + 16 * warp_of_four() + lane() / 4 + j / 2 * 8) / 2;
            int key = first_key + 8 * i + lane() % 4 * 2 + j % 2;
            if (key >= args.num_keys || pair >= half_dim) continue;
            float cos = args.cos[(long long)key * half_dim + pair];
            float sin = args.sin[(long long)key * half_dim + pair];
            x[i][j] = x[i][j] * cos + (is_odd ? -other : other) * sin;
        }
}

// 64 columns of dK or dV to memory, by way of a tile in shared memory that is free by now
DEVICE void store_columns(const float (&x)[M][4], const TensorMap& map, const Work& work, unsigned tile,
                          int part) {
    unsigned pairs[M / 2][4];
    to_operand(pairs, x);
    store_transposed(pairs, tile);
    publish_stores();
    meet(OUTPUT_WRITTEN + part, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
        store_tile(map, part * COLUMNS, work.key_tile * KEYS, work.key_head, work.batch, tile);
        end_copies();
    }
}

// dV in place of V and dK in place of K, once all have read them
DEVICE void store_grads(float (&grad_k)[M][4], const float (&grad_v)[M][4], const Backward& args,
                        const Work& work, unsigned memory, int part) {
    meet(P_WRITTEN, READERS * WARPGROUP);
    store_columns(grad_v, args.grad_v, work, memory + V_AT + part * KEY_TILE, part);
    scale_by(grad_k, args.scale);
    if (ROPE) unrotate_columns(grad_k, args, part * COLUMNS, work.key_tile * KEYS);
    store_columns(grad_k, args.grad_k, work, memory + K_AT + part * KEY_TILE, part);
    if (threadIdx.x % WARPGROUP == 0) wait_until_read<0>();
}

template <int GRAD_Q_COLUMNS>
DEVICE void multiply_all(const Backward& args, const Work& work, unsigned memory, int part) {
    int first_key = work.key_tile * KEYS + part * OWN_KEYS;
    unsigned own_keys = part * OWN_KEYS * ROW_BYTES;
    unsigned p_tile = memory + P_AT, grad_s_tile = memory + GRAD_S_AT, grad_out = memory + GRAD_OUT_AT;
    unsigned own_numbers = memory + (16 * warp_of_four() + lane() / 4) * 4;

    float grad_k[M][4], grad_v[M][4], grad_q[GRAD_Q_COLUMNS / 8][4], scores[N][4], grad_p[N][4];
    set_zero(grad_k);
    set_zero(grad_v);
    // zeros from here on: written within the loop, they would make the assembler serialize its matmuls
    keep(grad_k);
    keep(grad_v);
    wait(memory + K_FULL, 0);
    Step step(args, work);
    for (int i = 0; i < work.steps; ++i, step.next()) {
        unsigned q = memory + Q_AT + step.stage * TILES * QUERY_TILE;
        int first_query = step.tile * QUERIES;
        // S, which runs after dK of the step before this one
        wait(memory + Q_FULL + 8 * step.stage, step.parity);
        issue_transposed<QUERY_TILE, KEY_TILE>(scores, q, memory + K_AT + own_keys);
        wait_for_matmuls<1>();
        if (i) release(memory + Q_EMPTY + 8 * (step.stage ^ 1));
        // dP, and P meanwhile
        if (i == 0) wait(memory + V_FULL, 0);
        wait(memory + GRAD_OUT_FULL, step.grad_out_parity());
        issue_transposed<QUERY_TILE, KEY_TILE>(grad_p, grad_out, memory + V_AT + own_keys);
        wait_for_matmuls<1>();
        keep(scores);
        bool is_cut = first_key + OWN_KEYS > args.num_keys || first_query + QUERIES > args.num_queries;
        if (is_cut || (CAUSAL && first_query < first_key + OWN_KEYS - 1))
            hide<false>(scores, first_query, first_key, args);
        exponentiate(scores, own_numbers + LSE_AT + step.stage * QUERIES * 4, args.scale * LOG2_E);
        // All dV that read the last P are done: only then came this dO, which has no place of its own.
        share(scores, p_tile + own_keys, P_WRITTEN);
        // dV, and dS meanwhile
        issue_by_columns(grad_v, grad_out + part * QUERY_TILE, p_tile);
        wait_for_matmuls<1>();
        keep(grad_p);
        to_grad_s(grad_p, scores, own_numbers + DELTA_AT);
        // All dQ and dK that read the last dS are done: each warpgroup waited for them before it shared P.
        share(grad_p, grad_s_tile + own_keys, GRAD_S_WRITTEN);
        // dQ; and dK, which still runs when the next step begins
        issue_grad_q(grad_q, grad_s_tile, memory + K_AT + part * KEY_TILE);
        issue_by_columns(grad_k, q + part * QUERY_TILE, grad_s_tile);
        // dV is done: the next dO can come while these run
        wait_for_matmuls<2>();
        release(memory + GRAD_OUT_EMPTY);
        wait_for_matmuls<1>();
        hand_over(grad_q, memory, step.stage, part);
    }
    wait_for_matmuls<0>();
    keep(grad_k);
    keep(grad_v);
    store_grads(grad_k, grad_v, args, work, memory, part);
}

extern "C" __global__ void __launch_bounds__((READERS + 1) * WARPGROUP, 1)
    backward(const __grid_constant__ Backward args) {
    unsigned memory = shared_memory();
    if (threadIdx.x == 0) {
        make_load_barriers(memory);
        publish_barriers();
    }
    __syncthreads();
    // the same in all lanes, as the compiler now knows
    int warp = __shfl_sync(WHOLE_WARP, threadIdx.x / 32, 0);
    Work work(args);
    if (warp < 4) {
        give_up_registers<32>();
        if (warp == 0 && lane() == 0) load(args, work, memory);
        if (0 < warp && warp <= STAGES) add_grad_q(args, work, memory, warp - 1);
    } else {
        take_registers<160>();
        constexpr int LAST = columns_of_piece(READERS - 1);
        int part = warp / 4 - 1;
        if (LAST == COLUMNS || part < READERS - 1)
            multiply_all<COLUMNS>(args, work, memory, part);
        else
            multiply_all<LAST>(args, work, memory, part);
    }
}
