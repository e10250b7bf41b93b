// FlashAttention-2, forward (Dao 2023, Algorithm 1): output and log-sum-exp of ROWS queries.
#include <tiles.cuh>

// Fragments across a tile of keys: softmax takes a whole tile at a time
constexpr int N = COLUMNS / 8;
static_assert(STEP == COLUMNS, "weights of a tile must be relative to one maximum");

// Largest growth of a row's maximum, in powers of two, that leaves sum and output as they are:
// weights are then up to 2⁸ instead of 1, which changes no bit that float16 keeps.
constexpr float SLACK = 8;

// The state of online softmax, for the rows that a lane has a part of.
struct Softmax {
    float max[M][2];  // what exponents are relative to, in powers of two
    float sum[M][2];  // this lane's part

    DEVICE void reset() {
#pragma unroll
        for (int i = 0; i < 2 * M; ++i) max[i / 2][i % 2] = -INFINITE, sum[i / 2][i % 2] = 0;
    }

    // Turn scores into weights relative to `max`; where a row's maximum has grown, rescale.
    DEVICE void update(float (&scores)[M][N][4], float (&out)[M][2 * D][4], float scale_log2) {
        float grown[M][2];
        bool is_larger = false;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = -INFINITE;
#pragma unroll
                for (int n = 0; n < N; ++n)
                    x = fmaxf(x, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                // the four lanes of a quad hold the row
                x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
                x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2)) * scale_log2;
                is_larger |= x > max[m][half] + SLACK;
                grown[m][half] = fmaxf(x, max[m][half]);
            }
        if (__any_sync(WHOLE_WARP, is_larger)) rescale(grown, out);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // 0 where all scores so far are -inf: -inf - -inf is NaN
                float shift = max[m][half] == -INFINITE ? 0 : max[m][half];
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int j = 2 * half; j < 2 * half + 2; ++j) {
                        scores[m][n][j] = exp2_fast(scores[m][n][j] * scale_log2 - shift);
                        sum[m][half] += scores[m][n][j];
                    }
            }
    }

    DEVICE void rescale(const float (&grown)[M][2], float (&out)[M][2 * D][4]) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float shrink = exp2_fast(max[m][half] - (grown[m][half] == -INFINITE ? 0 : grown[m][half]));
                sum[m][half] *= shrink;
#pragma unroll
                for (int n = 0; n < 2 * D; ++n)
#pragma unroll
                    for (int j = 2 * half; j < 2 * half + 2; ++j) out[m][n][j] *= shrink;
                max[m][half] = grown[m][half];
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const Attention args) {
    // which queries of which head; under a causal mask long rows first, so that short ones fill gaps
    int num_tiles = (args.num_queries + ROWS - 1) / ROWS;
    int tile = blockIdx.x % num_tiles, batch_head = blockIdx.x / num_tiles;
    if (args.is_causal) tile = num_tiles - 1 - tile;
    int batch = batch_head / args.num_heads, head = batch_head % args.num_heads;
    const unsigned short* keys = args.k.rows(batch, head / args.group);
    const unsigned short* values = args.v.rows(batch, head / args.group);
    int first = tile * ROWS + warp() * 16 * M;  // this warp's queries

    // keys that any query of the block sees; that any and that all of this warp see
    int end = args.num_keys, warp_end = end, plain_end = end;
    if (args.is_causal) {
        end = min(end, tile * ROWS + ROWS);
        warp_end = min(end, first + 16 * M);
        plain_end = min(end, first + 1);
    }

    unsigned q[M][D][4];
    load_operand(q, args.q.rows(batch, head), args.q.token, first, args.num_queries, args.head_dim);
    float out[M][2 * D][4];
    set_zero(out);
    Softmax softmax;
    softmax.reset();

    // a tile of keys and one of values: one is on its way while the other is worked on
    Tile k_tile{shared_memory()}, v_tile{shared_memory() + COLUMNS * Tile::CHUNKS};
    Copy copy;
    copy.load(keys, args.k.token, 0, args.num_keys, args.head_dim);
    copy.store(k_tile);
    __syncthreads();
    for (int start = 0; start < end; start += COLUMNS) {
        copy.load(values, args.v.token, start, args.num_keys, args.head_dim);
        bool is_seen = start < warp_end;
        unsigned weights[M][N / 2][4];
        if (is_seen) {
            float scores[M][N][4];
            set_zero(scores);
            multiply_transposed(scores, q, k_tile, 0);  // S = Q Kᵀ
            if (start + COLUMNS > plain_end) hide<false>(scores, first, start, args);
            softmax.update(scores, out, args.scale * LOG2_E);
            to_operand(weights, scores);
        }
        copy.store(v_tile);
        __syncthreads();

        copy.load(keys, args.k.token, start + COLUMNS, args.num_keys, args.head_dim);
        if (is_seen) multiply(out, weights, v_tile, 0);  // O += P V
        copy.store(k_tile);
        __syncthreads();
    }

    // divide by the sum; zeros, and not NaN, for a query whose scores are all -inf
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = softmax.sum[m][half];
            sum += __shfl_xor_sync(WHOLE_WARP, sum, 1);
            sum += __shfl_xor_sync(WHOLE_WARP, sum, 2);
#pragma unroll
            for (int n = 0; n < 2 * D; ++n)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; ++j) out[m][n][j] *= sum == 0 ? 0 : 1 / sum;
            int query = first + row_of(m, half);
            if (lane() % 4 == 0 && query < args.num_queries)
                args.lse[(long long)batch_head * args.num_queries + query] =
                    softmax.max[m][half] * LN_2 + logf(sum);
        }
    store_rows(out, 1, args.out.rows(batch, head), args.out.token, first, args.num_queries,
               args.head_dim);
}
