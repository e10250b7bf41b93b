// The instructions of the chip that C++ has no words for, each as a function of one warp.
//
// Tensor cores multiply small matrices that are spread over the 32 lanes of a warp, as *fragments*.
// A lane holds 16-bit numbers in pairs, two to a register, the lower column in the lower half. With
// g = lane / 4 and t = lane % 4, the registers of a lane are
//
//     8×8 matrix   one register     row g, columns 2t and 2t + 1
//     A, 16×16     a[0] to a[3]     its 8×8 quarters: upper left, lower left, upper right, lower right
//     B, 16×8      b[0], b[1]       its upper and lower half, each as a transposed 8×8 matrix
//     C, 16×8      c[0] to c[3]     float32: row g, columns 2t and 2t + 1; the same of row g + 8
//
// A row of four lanes, a "quad", so holds whole rows of C, and two neighboring C, rounded to 16
// bits, are an A: the result of one matmul enters the next without leaving its lane.
#pragma once

#include <numbers.cuh>

// C += A · B on tensor cores. Turing's have half the depth: two instructions there, each on 8 columns
// of A and 8 rows of B.
DEVICE void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// Four 8×8 matrices from shared memory: lanes 8i to 8i + 7 name the eight rows of matrix i, of 16
// bytes each, and every lane receives its pair of each matrix.
DEVICE void load_matrices(unsigned (&r)[4], const uint4* row) {
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, with each matrix transposed.
DEVICE void load_matrices_transposed(unsigned (&r)[4], const uint4* row) {
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void store_shared(uint4* to, uint4 x) { *to = x; }

#if ASYNC
// Copy 16 bytes from memory, or zeros, past the registers, while the thread goes on.
DEVICE void copy_async(uint4* to, const void* from, bool is_inside) {
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(is_inside ? 16 : 0)
                 : "memory");
}

// Wait until all that this thread copies is there.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// The block's shared memory.
DEVICE uint4* shared_memory() {
    extern __shared__ uint4 memory[];
    return memory;
}
