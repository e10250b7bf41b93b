// FlashAttention-2, backward (Dao 2023, Algorithm 2): dK and dV of ROWS keys.
//
// Tiles of scores are (keys, queries), so that nothing that was computed has to be transposed. One
// block sums each number, over the heads of a group too: results repeat to the bit.
#include <tiles.cuh>

// Fragments across a step of queries
constexpr int N = STEP / 8;
static_assert(STAGES == 2 || !ASYNC, "a tile that is worked on must not be overwritten");
static_assert(COLUMNS <= THREADS, "a thread for the lse and delta of each query of a tile");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) grad_keys(const Attention args) {
    // which keys of which head
    int num_tiles = (args.num_keys + ROWS - 1) / ROWS;
    int tile = blockIdx.x % num_tiles, batch_head = blockIdx.x / num_tiles;
    int num_key_heads = args.num_heads / args.group;
    int batch = batch_head / num_key_heads, key_head = batch_head % num_key_heads;
    int first = tile * ROWS + warp() * 16 * M;  // this warp's keys

    Operand k, v;
    k.load(0, args.k.rows(batch, key_head), args.k.token, first, args.num_keys, args.head_dim);
    v.load(1, args.v.rows(batch, key_head), args.v.token, first, args.num_keys, args.head_dim);
    float scale_log2 = args.scale * LOG2_E;
    float grad_k[M][2 * D][4], grad_v[M][2 * D][4];
    set_zero(grad_k);
    set_zero(grad_v);

    // the tiles that come next are on their way while these are worked on; each stage has room for
    // the log-sum-exp, in base 2, and the delta of its queries
    Copy q_copy, grad_out_copy;
    float next_lse, next_delta;
    float* numbers = (float*)(shared_memory() + STAGES * 2 * COLUMNS * Tile::CHUNKS);
    // under a causal mask no query before the first of these keys sees any of them
    int begin = args.is_causal ? tile * ROWS / COLUMNS * COLUMNS : 0, stage = 0;
    // the queries of every head that shares these keys
    for (int head = key_head * args.group; head < (key_head + 1) * args.group; ++head) {
        const unsigned short* queries = args.q.rows(batch, head);
        const unsigned short* grad_outs = args.grad_out.rows(batch, head);
        long long rows = ((long long)batch * args.num_heads + head) * args.num_queries;
        auto begin_copies = [&](int start, int to) {
            q_copy.begin(tile_of(to, 0), queries, args.q.token, start, args.num_queries,
                         args.head_dim);
            grad_out_copy.begin(tile_of(to, 1), grad_outs, args.grad_out.token, start,
                                args.num_queries, args.head_dim);
            int query = start + threadIdx.x;
            bool is_inside = threadIdx.x < COLUMNS && query < args.num_queries;
            next_lse = is_inside ? args.lse[rows + query] : -INFINITE;
            next_delta = is_inside ? args.delta[rows + query] : 0;
        };
        begin_copies(begin, stage);
        for (int start = begin; start < args.num_queries; start += COLUMNS) {
            Tile q_tile = tile_of(stage, 0), grad_out_tile = tile_of(stage, 1);
            float* lse_log2 = numbers + stage * 2 * COLUMNS;
            float* delta = lse_log2 + COLUMNS;
            q_copy.finish(q_tile);
            grad_out_copy.finish(grad_out_tile);
            if (threadIdx.x < COLUMNS) {
                lse_log2[threadIdx.x] = weight_base(next_lse);
                delta[threadIdx.x] = next_delta;
            }
            __syncthreads();
            stage = next_stage(stage);
            if (start + COLUMNS < args.num_queries) begin_copies(start + COLUMNS, stage);
#pragma unroll
            for (int i = 0; i < COLUMNS; i += STEP) {
                // all of these queries come before this warp's keys
                if (args.is_causal && start + i + STEP <= first) continue;
                float scores[M][N][4], grad_p[M][N][4];
                set_zero(scores);
                multiply_transposed(scores, k, q_tile, i);  // Sᵀ = K Qᵀ
                // at the end of the queries, and on the diagonal
                bool is_on_diagonal = args.is_causal && start + i < first + 16 * M - 1;
                if (is_on_diagonal || start + i + STEP > args.num_queries)
                    hide<true>(scores, first, start + i, args);
                set_zero(grad_p);
                multiply_transposed(grad_p, v, grad_out_tile, i);  // dPᵀ = V dOᵀ
#pragma unroll
                for (int j = 0; j < 2 * N; ++j) {
                    float base = lse_log2[i + column_of(j)], dot = delta[i + column_of(j)];
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        float p = exp2_fast(element(scores, r, j) * scale_log2 - base);
                        element(scores, r, j) = p;
                        element(grad_p, r, j) = p * (element(grad_p, r, j) - dot);  // dSᵀ
                    }
                }
                unsigned operand[M][N / 2][4];
                to_operand(operand, scores);
                multiply(grad_v, operand, grad_out_tile, i);  // dV += Pᵀ dO
                to_operand(operand, grad_p);
                multiply(grad_k, operand, q_tile, i);  // dK += dSᵀ Q
            }
            if (STAGES == 1) __syncthreads();
        }
    }

    store_rows(grad_k, args.scale, args.grad_k.rows(batch, key_head), args.grad_k.token, first,
               args.num_keys, args.head_dim);
    store_rows(grad_v, 1, args.grad_v.rows(batch, key_head), args.grad_v.token, first, args.num_keys,
               args.head_dim);
}
