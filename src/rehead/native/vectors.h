// Vectors as wide as the processor's registers, written with compiler extensions, so that they work on any processor.
// Wider vectors would live in memory: GCC keeps no variable in registers that is wider than one register.

#pragma once

#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int64_t W = 16;  // floats in a vector
constexpr int SUMS = 24;   // vectors of sums that fit in registers, beside what is added to them
#elif defined(__AVX2__)
constexpr int64_t W = 8;
constexpr int SUMS = 12;
#elif defined(__aarch64__)
constexpr int64_t W = 4;
constexpr int SUMS = 24;
#else
constexpr int64_t W = 4;
constexpr int SUMS = 12;
#endif

typedef float Floats __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * W)));
const Integers COUNT = [] { Integers v; for (int i = 0; i < W; i++) v[i] = i; return v; }();

inline Floats load(const float* p) { return *(const Floats*)p; }

// The last `left` of a vector, and 0 before them. What remains of a row is read so, in a vector that ends with the row.
inline Floats last(Floats v, int64_t left) { return COUNT >= int32_t(W - left) ? v : Floats{}; }

inline float sum(Floats v) { float s = 0; for (int i = 0; i < W; i++) s += v[i]; return s; }

// e^x with a relative error of 3e-7 (4e-6 without fused multiply-add), clamped to [1e-38, 1e38]. Computed as 2^n times a
// polynomial, where n is the nearest integer to x / ln 2.
inline Floats exponential(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x > 88.0f ? Floats{} + 88.0f : x;
    Floats scaled = x * 1.44269504f;
    Integers n = __builtin_convertvector(scaled < 0 ? scaled - 0.5f : scaled + 0.5f, Integers);
    Floats whole = __builtin_convertvector(n, Floats), r = x - whole * 0.69314718f;
    Floats p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
                1.6666665459e-1f) * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * (Floats)((n + 127) << 23);
}

// GELU's tanh form: x sigmoid(2 u) = x (1 + tanh u) / 2
constexpr float OUTER = 1.5957691216f, INNER = 0.044715f;
inline Floats gelu(Floats x) { return x / (1 + exponential(-OUTER * (x + INNER * x * x * x))); }

}  // namespace
