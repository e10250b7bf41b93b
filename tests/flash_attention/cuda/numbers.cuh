// What CUDA's language has and C++ has not, and numbers of 16 bits, for kernels on a CPU.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#define DEVICE inline
#define WHOLE_WARP 0xffffffffu
#define INFINITE INFINITY
#define __global__
#define __launch_bounds__(...)
using std::min;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct Index {
    unsigned x;
};
inline Index threadIdx, blockIdx;

// 16-bit floating point

extern const bool is_bfloat16;  // BFLOAT16 of the kernels, which are compiled apart from the emulator

inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float to_float(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    if (is_bfloat16) return as_float(wide);
    uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 0) return (sign ? -1 : 1) * ldexpf(mantissa, -24);
    wide = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    return as_float(wide);
}

// Rounds to the nearest, and to even in the middle.
inline uint16_t to_16_bits(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if (x != x) return 0x7fff;
    if (is_bfloat16) return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    uint16_t sign = wide >> 16 & 0x8000;
    float size = fabsf(x);
    if (size >= 65520) return sign | 0x7c00;
    if (size < ldexpf(1, -14)) return sign | uint16_t(nearbyintf(ldexpf(size, 24)));
    wide = (wide & 0x7fffffff) - (112u << 23);
    return sign | (wide + 0xfff + (wide >> 13 & 1)) >> 13;
}

inline unsigned pack(float low, float high) { return to_16_bits(low) | unsigned(to_16_bits(high)) << 16; }
inline float2 unpack(unsigned pair) { return {to_float(pair & 0xffff), to_float(pair >> 16)}; }
inline float exp2_fast(float x) { return exp2f(x); }
