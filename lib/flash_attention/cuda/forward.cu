// FlashAttention-2, forward (Dao 2023, Algorithm 1): output and log-sum-exp of ROWS queries.
#include <tiles.cuh>

// Fragments across a tile of keys: softmax takes a whole tile at a time
constexpr int N = COLUMNS / 8;
static_assert(STEP == COLUMNS, "weights of a tile must be relative to one maximum");

// Largest growth of a row's maximum, in powers of two, that leaves sum and output as they are:
// weights are then up to 2⁸ instead of 1. They are as precise: floating point keeps as many bits.
constexpr float SLACK = 8;

// The state of online softmax, for the rows that a lane has a part of.
struct Softmax {
    float max[R];  // what exponents are relative to, in powers of two
    float sum[R];  // this lane's part

    // Turn scores into weights relative to `max`. Where a row's maximum has grown, rescale first.
    DEVICE void update(float (&scores)[M][N][4], float (&out)[M][2 * D][4], float scale_log2) {
        float grown[R];
        bool is_much_larger = false;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float x = -INFINITE;
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) x = fmaxf(x, element(scores, r, i));
            // the four lanes of a quad hold the row
            x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
            x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2)) * scale_log2;
            is_much_larger |= x > max[r] + SLACK;
            grown[r] = fmaxf(x, max[r]);
        }
        if (__any_sync(WHOLE_WARP, is_much_larger)) rescale(grown, out);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            // 0 where all scores so far are -inf: -inf - -inf is NaN
            float shift = max[r] == -INFINITE ? 0 : max[r];
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) {
                float weight = exp2_fast(element(scores, r, i) * scale_log2 - shift);
                element(scores, r, i) = weight;
                sum[r] += weight;
            }
        }
    }

    DEVICE void rescale(const float (&grown)[R], float (&out)[M][2 * D][4]) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float shrink = exp2_fast(max[r] - (grown[r] == -INFINITE ? 0 : grown[r]));
            max[r] = grown[r];
            sum[r] *= shrink;
#pragma unroll
            for (int i = 0; i < 4 * D; ++i) element(out, r, i) *= shrink;
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

    Operand q;
    q.load(0, args.q.rows(batch, head), args.q.token, first, args.num_queries, args.head_dim);
    float out[M][2 * D][4];
    set_zero(out);
    Softmax softmax;
#pragma unroll
    for (int r = 0; r < R; ++r) softmax.max[r] = -INFINITE, softmax.sum[r] = 0;

    // a tile of keys and one of values: one is on its way while the other is worked on
    Tile k_tile = tile_of(0, 0), v_tile = tile_of(0, 1);
    Copy copy;
    copy.begin(k_tile, keys, args.k.token, 0, args.num_keys, args.head_dim);
    copy.finish(k_tile);
    __syncthreads();
    for (int start = 0; start < end; start += COLUMNS) {
        copy.begin(v_tile, values, args.v.token, start, args.num_keys, args.head_dim);
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
        copy.finish(v_tile);
        __syncthreads();

        copy.begin(k_tile, keys, args.k.token, start + COLUMNS, args.num_keys, args.head_dim);
        if (is_seen) multiply(out, weights, v_tile, 0);  // O += P V
        copy.finish(k_tile);
        __syncthreads();
    }

    // divide by the sum; zeros, and not NaN, for a query whose scores are all -inf
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float sum = softmax.sum[r];
        sum += __shfl_xor_sync(WHOLE_WARP, sum, 1);
        sum += __shfl_xor_sync(WHOLE_WARP, sum, 2);
#pragma unroll
        for (int i = 0; i < 4 * D; ++i) element(out, r, i) *= sum == 0 ? 0 : 1 / sum;
        int query = first + row_of(r);
        if (lane() % 4 == 0 && query < args.num_queries)
            args.lse[(long long)batch_head * args.num_queries + query] =
                softmax.max[r] * LN_2 + logf(sum);
    }
    store_rows(out, 1, args.out.rows(batch, head), args.out.token, first, args.num_queries,
               args.head_dim);
}
