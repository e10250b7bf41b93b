// What all kernels do with single numbers: 16 bits and float32, exponentials.
#pragma once

#define DEVICE __device__ __forceinline__
#define WHOLE_WARP 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

#if BFLOAT16 && __CUDA_ARCH__ < 800
#error "bfloat16 needs sm_80 or later"
#elif BFLOAT16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif

// Two numbers, rounded to 16 bits, in one register.
DEVICE unsigned pack(float low, float high) {
    unsigned pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("{.reg .f16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; "
        "mov.b32 %0, {low, high};}"
        : "=r"(pair)
        : "f"(low), "f"(high));
#endif
    return pair;
}

// The numbers of a pair.
DEVICE float2 unpack(unsigned pair) {
    float2 x;
#if BFLOAT16
    x.x = __uint_as_float(pair << 16);
    x.y = __uint_as_float(pair & 0xffff0000u);
#else
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(pair));
#endif
    return x;
}

// 2 to the power x, in one instruction.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
