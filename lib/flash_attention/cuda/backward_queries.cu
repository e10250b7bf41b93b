// FlashAttention-2, backward (Dao 2023, Algorithm 2): delta of each query, and dQ of ROWS queries.
#include <tiles.cuh>

// Fragments across a step of keys
constexpr int N = STEP / 8;
static_assert(STAGES == 2 || !ASYNC, "a tile that is worked on must not be overwritten");

// delta = rowsum(dO ∘ O). Sixteen lanes take a row, each one chunk of 8 numbers.
extern "C" __global__ void __launch_bounds__(THREADS) row_dots(const Attention args) {
    long long index = (long long)blockIdx.x * (THREADS / 16) + threadIdx.x / 16;
    int query = index % args.num_queries;
    int head = index / args.num_queries % args.num_heads;
    long long batch = index / args.num_queries / args.num_heads;
    int column = threadIdx.x % 16 * 8;
    float sum = 0;
    if (batch < args.batch_size && column < args.head_dim) {
        const unsigned short* out = args.out.rows(batch, head) + (long long)query * args.out.token;
        const unsigned short* grad_out =
            args.grad_out.rows(batch, head) + (long long)query * args.grad_out.token;
        uint4 x = *(const uint4*)(out + column), y = *(const uint4*)(grad_out + column);
        const unsigned a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 u = unpack(a[i]), v = unpack(b[i]);
            sum += u.x * v.x + u.y * v.y;
        }
    }
#pragma unroll
    for (int distance = 8; distance; distance /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, distance);
    if (batch < args.batch_size && threadIdx.x % 16 == 0) args.delta[index] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) grad_queries(const Attention args) {
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

    Operand q, grad_out;
    q.load(0, args.q.rows(batch, head), args.q.token, first, args.num_queries, args.head_dim);
    grad_out.load(1, args.grad_out.rows(batch, head), args.grad_out.token, first, args.num_queries,
                  args.head_dim);
    float lse_log2[R], delta[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        int query = first + row_of(r);
        long long index = (long long)batch_head * args.num_queries + query;
        bool is_inside = query < args.num_queries;
        lse_log2[r] = weight_base(is_inside ? args.lse[index] : -INFINITE);
        delta[r] = is_inside ? args.delta[index] : 0;
    }
    float scale_log2 = args.scale * LOG2_E;
    float grad_q[M][2 * D][4];
    set_zero(grad_q);

    // the tiles that come next are on their way while these are worked on
    Copy k_copy, v_copy;
    k_copy.begin(tile_of(0, 0), keys, args.k.token, 0, args.num_keys, args.head_dim);
    v_copy.begin(tile_of(0, 1), values, args.v.token, 0, args.num_keys, args.head_dim);
    for (int start = 0, stage = 0; start < end; start += COLUMNS, stage = next_stage(stage)) {
        Tile k_tile = tile_of(stage, 0), v_tile = tile_of(stage, 1);
        k_copy.finish(k_tile);
        v_copy.finish(v_tile);
        __syncthreads();
        int next = start + COLUMNS, to = next_stage(stage);
        if (next < end) {
            k_copy.begin(tile_of(to, 0), keys, args.k.token, next, args.num_keys, args.head_dim);
            v_copy.begin(tile_of(to, 1), values, args.v.token, next, args.num_keys, args.head_dim);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i += STEP) {
            if (start + i >= warp_end) break;
            float scores[M][N][4], grad_p[M][N][4];
            set_zero(scores);
            multiply_transposed(scores, q, k_tile, i);  // S = Q Kᵀ
            set_zero(grad_p);
            multiply_transposed(grad_p, grad_out, v_tile, i);  // dP = dO Vᵀ
            if (start + i + STEP > plain_end) hide<false>(scores, first, start + i, args);
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int j = 0; j < 2 * N; ++j) {
                    float p = exp2_fast(element(scores, r, j) * scale_log2 - lse_log2[r]);
                    element(scores, r, j) = p * (element(grad_p, r, j) - delta[r]);  // dS
                }
            unsigned grad_scores[M][N / 2][4];
            to_operand(grad_scores, scores);
            multiply(grad_q, grad_scores, k_tile, i);  // dQ += dS K
        }
        if (STAGES == 1) __syncthreads();
    }

    store_rows(grad_q, args.scale, args.grad_q.rows(batch, head), args.grad_q.token, first,
               args.num_queries, args.head_dim);
}
