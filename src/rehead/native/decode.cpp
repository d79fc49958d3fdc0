// One token of every sequence through a whole model: a list of operations, executed by a few threads.
//
// Activations are float; weights and caches are float or bfloat16 and are read in place. Every sequence b has a position:
// its token is stored in cache row position % n_row and attends to min(position + 1, n_row) rows. No mask, no copy.
// Built by build.py with GCC, or another compiler that uses PyTorch's OpenMP.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>
#include <omp.h>
#include "vectors.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W), aligned(2), may_alias));
constexpr int64_t TILE = 64;  // keys whose scores are computed at once
constexpr int64_t AHEAD = 8192;  // minimum distance of prefetches in bytes
constexpr int64_t PANEL = 16;  // columns of a panel of weights
constexpr int64_t PARTS = 16;  // shares of the rows of attend_rebuilt, whatever the number of threads

struct Bfloat16 { uint16_t bits; };

inline float number(float x) { return x; }
inline float number(Bfloat16 x) { uint32_t w = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &w, 4); return f; }
inline Floats load(const Bfloat16* p) { return (Floats)(__builtin_convertvector(*(const Halves*)p, Words) << 16); }
inline void store(float* p, float x) { *p = x; }
inline void store(Bfloat16* p, float x) {
    uint32_t w; std::memcpy(&w, &x, 4);
    p->bits = x != x ? 0x7fc0 : uint16_t((w + 0x7fff + ((w >> 16) & 1)) >> 16);
}

// Element i of the result is the sum of v[i]: sixteen sums for little more than the cost of five.
#if defined(__AVX512F__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SUMS_TOGETHER
template <int D> inline Floats halve(Floats a, Floats b) {  // blocks of 2 D floats reduced to D, from a and b in turn
#define LOW(i) ((i) & D ? W + (i) - D : (i))
#define HIGH(i) ((i) & D ? W + (i) : (i) + D)
#define ALL(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
    return __builtin_shufflevector(a, b, ALL(LOW)) + __builtin_shufflevector(a, b, ALL(HIGH));
}
inline Floats sums(Floats v[W]) {
    for (int i = 0; i < 8; i++) v[i] = halve<8>(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) v[i] = halve<4>(v[i], v[i + 4]);
    for (int i = 0; i < 2; i++) v[i] = halve<2>(v[i], v[i + 2]);
    return halve<1>(v[0], v[1]);
}
#endif
#endif

inline Floats silu(Floats x) { return x / (1 + exponential(-x)); }

enum Kind : int64_t {
    EMBED, NORM, LINEAR, EXPAND, ROTATE, STORE, ATTEND, GATE, SCALE, INVERSE_RMS, ATTEND_REBUILT, JOIN
};

struct Op {  // set by native_program.py as a NativeOp; fields not explained here are explained where they are read
    int64_t kind, bfloat16, sync;            // weights and cache are bfloat16; all threads wait after it
    int64_t add, gelu, centred, interleaved; // y += scale * instead of y =; GELU, 1 tanh, 2 erf; LayerNorm; pairs (2i, 2i + 1)
    const void *w, *w2, *b, *g;              // weights or cache rows, a second of them, biases, weights of a norm
    const float *cos, *sin;                  // cosines and signed sines by position, `rotated` of each
    const float* x;
    float* y;
    int64_t n, k, heads, group, rows, column, scales, rotated;  // sizes; query heads per KV head; rows of the cache, a column there
    int64_t x_row, x_head, x_kv, y_row, y_head, y_kv, w_head, w_row, w2_row, b_head;  // strides, in elements
    double eps, scale, cap;                  // of a norm; of scores, what is added, embeddings; soft cap or 0
    double offset;                           // added to a norm's weights
};

struct Call { const int64_t* ids; const int64_t* positions; int64_t batch; };

// Divides `total` items among n threads: thread `id` processes [from, to), in multiples of `step`.
struct Share { int64_t from, to; };
inline Share share(int64_t total, int64_t step, int64_t id, int64_t n) {
    int64_t blocks = (total + step - 1) / step;
    return {std::min(total, blocks * id / n * step), std::min(total, blocks * (id + 1) / n * step)};
}

template <class T> void embed(const Op& op, const Call& call, int64_t id, int64_t n) {  // w: tokens, w2: positions
    for (int64_t b = id; b < call.batch; b += n) {
        const T* token = (const T*)op.w + call.ids[b] * op.n;
        const T* place = op.w2 ? (const T*)op.w2 + call.positions[b] * op.n : nullptr;
        float scale = float(op.scale);
        for (int64_t i = 0; i < op.n; i++)
            op.y[b * op.y_row + i] = number(token[i]) * scale + (place ? number(place[i]) : 0);
    }
}

template <class T> void norm(const Op& op, const Call& call, int64_t id, int64_t n) {  // centred: LayerNorm, else RMSNorm
    for (int64_t at = id; at < call.batch * op.heads; at += n) {
        const float* x = op.x + at / op.heads * op.x_row + at % op.heads * op.x_head;
        float* y = op.y + at / op.heads * op.y_row + at % op.heads * op.y_head;
        double mean = 0, square = 0;
        if (op.centred) { float s = 0; for (int64_t i = 0; i < op.n; i++) s += x[i]; mean = s / op.n; }
        float part = 0, shift = float(mean);
        for (int64_t i = 0; i < op.n; i++) part += (x[i] - shift) * (x[i] - shift);
        square = part / op.n;
        float scale = float(1 / std::sqrt(square + op.eps));
        const T *w = (const T*)op.w, *b = (const T*)op.b;
        float offset = float(op.offset), times = float(op.scale);
        if (!op.add && !op.offset)
            for (int64_t i = 0; i < op.n; i++)
                y[i] = (x[i] - shift) * scale * (w ? number(w[i]) : 1) + (b ? number(b[i]) : 0);
        else
            for (int64_t i = 0; i < op.n; i++) {
                float v = (x[i] - shift) * scale * (number(w[i]) + offset) + (b ? number(b[i]) : 0);
                y[i] = op.add ? y[i] + v * times : v;
            }
    }
}

void inverse_rms(const Op& op, const Call& call, int64_t id, int64_t n) {  // one number per head
    for (int64_t at = id; at < call.batch * op.heads; at += n) {
        const float* x = op.x + at / op.heads * op.x_row + at % op.heads * op.x_head;
        float square = 0;
        for (int64_t i = 0; i < op.n; i++) square += x[i] * x[i];
        op.y[at / op.heads * op.y_row + at % op.heads * op.y_head] = float(1 / std::sqrt(square / op.n + op.eps));
    }
}

inline void gelu(float* x, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) *(Floats*)(x + i) = gelu(load(x + i));
    for (; i < n; i++) x[i] = gelu(Floats{} + x[i])[0];
}

// out[i][j] = sum over k of a[i][k] b[j][k], I x J results: the product of linear layers and of scores. Rows of b are
// contiguous in memory. Data at least AHEAD bytes or two calls further on is prefetched into the L2 cache in order of its
// addresses, since the hardware prefetcher stops at the end of each row.
template <int I, int J, class T>
inline void dots(const float* a, int64_t lda, const T* b, int64_t ldb, int64_t k, float out[I][J]) {
    if constexpr (I * J > SUMS) {
        dots<I / 2, J>(a, lda, b, ldb, k, out);
        return dots<I - I / 2, J>(a + I / 2 * lda, lda, b, ldb, k, out + I / 2);
    }
    Floats s[I * J] = {};
    uintptr_t later = uintptr_t(b) + std::max(AHEAD, int64_t(2 * J * sizeof(T)) * ldb);
    int64_t at = 0;
    auto more = [&](auto counted) {  // W products of each sum
        Floats row[J];
        for (int j = 0; j < J; j++) row[j] = counted(load(b + j * ldb + at));
        for (int line = 0; line < J * W * int(sizeof(T)); line += 64) __builtin_prefetch((const void*)(later + line), 0, 2);
        later += J * W * sizeof(T);
        for (int i = 0; i < I; i++) {
            Floats v = counted(load(a + i * lda + at));
            for (int j = 0; j < J; j++) s[i * J + j] += v * row[j];
        }
        at += W;
    };
    while (at + W <= k) more([](Floats v) { return v; });
    if (int64_t left = k - at; left && k >= W) at = k - W, more([left](Floats v) { return last(v, left); });
#ifdef SUMS_TOGETHER
    if constexpr (I * J == W) {
        *(Floats*)out = sums(s);
    } else
#endif
        for (int i = 0; i < I; i++)
            for (int j = 0; j < J; j++) out[i][j] = sum(s[i * J + j]);
    for (; at < k; at++)
        for (int i = 0; i < I; i++)
            for (int j = 0; j < J; j++) out[i][j] += a[i * lda + at] * number(b[j * ldb + at]);
}

// I x J results of a linear layer: y[b][h][n] (+)= sum over k of x[b][h][k] w[h / group][n][k] + bias[h / group][n]
template <int I, int J, class T>
inline void tile(const Op& op, const float* x, const T* w, const T* bias, float* y) {
    float out[I][J];
    dots<I, J>(x, op.x_row, w, op.k, op.k, out);
    for (int i = 0; i < I; i++)
        for (int j = 0; j < J; j++) {
            float v = out[i][j] + (bias ? number(bias[j]) : 0);
            float* to = y + i * op.y_row + j;
            *to = op.add ? *to + v * float(op.scale) : v;
        }
}

// The same for one x and the rows of w one after another: a single stream, which the hardware prefetcher follows.
// If w is not in a cache, this is faster than four rows at a time, unless the elements must be widened.
inline void rows(const Op& op, const float* x, const float* w, const float* bias, float* y, int64_t n) {
    int64_t k = op.k;
    for (int64_t j = 0; j < n; j++, w += k) {
        Floats s[4] = {};
        int64_t at = 0;
        for (; at + 4 * W <= k; at += 4 * W)
            for (int u = 0; u < 4; u++) s[u] += load(x + at + u * W) * load(w + at + u * W);
        for (; at + W <= k; at += W) s[0] += load(x + at) * load(w + at);
        float v = sum(s[0] + s[1] + (s[2] + s[3])) + (bias ? bias[j] : 0);
        for (; at < k; at++) v += x[at] * w[at];
        y[j] = op.add ? y[j] + v * float(op.scale) : v;
    }
}

template <class T> void linear(const Op& op, const Call& call, int64_t id, int64_t n) {
    for (int64_t h = 0; h < op.heads; h++) {
        const T* w = (const T*)op.w + h / op.group * op.w_head;
        const T* bias = op.b ? (const T*)op.b + h / op.group * op.b_head : nullptr;
        Share mine = op.heads > 1 ? Share{0, h % n == id ? op.n : 0} : share(op.n, W, id, n);
        int64_t j = mine.from;
        if constexpr (std::is_same_v<T, float>)
            if (call.batch == 1 && op.k >= 8 * W) {
                rows(op, op.x + h * op.x_head, w + j * op.k, bias ? bias + j : nullptr, op.y + h * op.y_head + j, mine.to - j);
                j = mine.to;
            }
        while (j < mine.to) {
            bool four = j + 4 <= mine.to;
            for (int64_t b = 0; b < call.batch;) {
                const float* x = op.x + b * op.x_row + h * op.x_head;
                float* y = op.y + b * op.y_row + h * op.y_head + j;
                const T* part = bias ? bias + j : nullptr;
                int64_t left = call.batch - b;
                if (!four) { tile<1, 1>(op, x, w + j * op.k, part, y); b += 1; }
                else if (left >= 4) { tile<4, 4>(op, x, w + j * op.k, part, y); b += 4; }
                else if (left >= 2) { tile<2, 4>(op, x, w + j * op.k, part, y); b += 2; }
                else { tile<1, 4>(op, x, w + j * op.k, part, y); b += 1; }
            }
            j += four ? 4 : 1;
        }
        for (int64_t b = 0; op.gelu && b < call.batch; b++) {
            float* y = op.y + b * op.y_row + h * op.y_head + mine.from;
            if (op.gelu == 1) gelu(y, mine.to - mine.from);
            else for (int64_t i = 0; i < mine.to - mine.from; i++) y[i] *= (1 + std::erf(y[i] * 0.70710678f)) / 2;
        }
    }
}

// y[b][h][k] = sum over n of x[b][h][n] w[h / group][n][k]: the transposed product, which absorbs an expansion into queries
template <class T> void expand(const Op& op, const Call& call, int64_t id, int64_t n) {
    for (int64_t at = id; at < call.batch * op.heads; at += n) {
        int64_t b = at / op.heads, h = at % op.heads;
        const float* x = op.x + b * op.x_row + h * op.x_head;
        float* y = op.y + b * op.y_row + h * op.y_head;
        const T* w = (const T*)op.w + h / op.group * op.w_head;
        std::fill(y, y + op.k, 0.0f);
        for (int64_t i = 0; i < op.n; i++)
            for (int64_t k = 0; k < op.k; k++) y[k] += x[i] * number(w[i * op.k + k]);
    }
}

// Rotates the first `rotated` of a head's k elements to `position` and copies the others
inline void rotate_head(const Op& op, const float* __restrict x, float* __restrict y, int64_t position) {
    const float *cos = op.cos + position * op.rotated, *sin = op.sin + position * op.rotated;
    int64_t half = op.rotated / 2;
    if (op.interleaved)
        for (int64_t p = 0; p < op.rotated; p += 2) {
            y[p] = x[p] * cos[p] + x[p + 1] * sin[p];
            y[p + 1] = x[p + 1] * cos[p + 1] + x[p] * sin[p + 1];
        }
    else
        for (int64_t p = 0, q = half; p < half; p++, q++) {
            y[p] = x[p] * cos[p] + x[q] * sin[p];
            y[q] = x[q] * cos[q] + x[p] * sin[q];
        }
    std::copy(x + op.rotated, x + op.k, y + op.rotated);
}

void rotate(const Op& op, const Call& call, int64_t id, int64_t n) {
    for (int64_t at = id; at < call.batch * op.heads; at += n) {
        int64_t b = at / op.heads, h = at % op.heads;
        rotate_head(op, op.x + b * op.x_row + h * op.x_head, op.y + b * op.y_row + h * op.y_head, call.positions[b]);
    }
}

// Copies x[b][h] to the row of its position in the cache (b, h, rows, k), starting at `column`
template <class T> void store_rows(const Op& op, const Call& call, int64_t id, int64_t n) {
    for (int64_t at = id; at < call.batch * op.heads; at += n) {
        int64_t b = at / op.heads, row = at * op.rows + call.positions[b] % op.rows;
        const float* x = op.x + b * op.x_row + at % op.heads * op.x_head;
        for (int64_t i = 0; i < op.n; i++) store((T*)op.w + row * op.k + op.column + i, x[i]);
    }
}

inline Floats soft_capped(Floats x, float cap) { return cap - 2 * cap / (1 + exponential(x * (2 / cap))); }  // cap tanh(x / cap)

// Attention of up to I query heads over some keys: scores, times scales[i] of each key if there are any, an online softmax
// and the sum of values, in O(TILE) memory.
template <int I, class T>
inline void meet(const float* q, int64_t q_head, const T* key, int64_t ldk, const T* value, int64_t ldv, int64_t count,
                 int64_t width, int64_t n_value, float scale, const T* const* scales, float cap, float* top, float* total,
                 float* y, int64_t y_head) {
    float p[I][TILE];
    for (int i = 0; i < I; i++) std::fill(p[i], p[i] + TILE, -INFINITY);
    for (int64_t s = 0; s < count;) {
        if (s + 4 <= count) {
            float out[I][4];
            dots<I, 4>(q, q_head, key + s * ldk, ldk, width, out);
            for (int i = 0; i < I; i++) for (int j = 0; j < 4; j++) p[i][s + j] = out[i][j] * scale;
            s += 4;
        } else {
            float out[I][1];
            dots<I, 1>(q, q_head, key + s * ldk, ldk, width, out);
            for (int i = 0; i < I; i++) p[i][s] = out[i][0] * scale;
            s += 1;
        }
    }
    if (scales) for (int i = 0; i < I; i++) for (int64_t s = 0; s < count; s++) p[i][s] *= number(scales[i][s * ldk]);
    for (int i = 0; cap && i < I; i++) {
        for (int64_t s = 0; s < count; s += W) *(Floats*)(p[i] + s) = soft_capped(load(p[i] + s), cap);
        std::fill(p[i] + count, p[i] + TILE, -INFINITY);
    }
    for (int i = 0; i < I; i++) {
        float high = top[i];
        for (int64_t s = 0; s < TILE; s++) high = std::max(high, p[i][s]);
        float shrink = std::exp(top[i] - high);
        Floats each{};
        for (int64_t s = 0; s < TILE; s += W) {
            Floats some = exponential(load(p[i] + s) - high);
            *(Floats*)(p[i] + s) = some, each += some;
        }
        float more = sum(each);
        if (shrink != 1) for (int64_t v = 0; v < n_value; v++) y[i * y_head + v] *= shrink;
        top[i] = high, total[i] = total[i] * shrink + more;
    }
    int64_t v = 0;
    auto add = [&]<int J>(auto counted) {  // J vectors of values
        Floats a[I][J];
        for (int i = 0; i < I; i++) for (int j = 0; j < J; j++) a[i][j] = load(y + i * y_head + v + j * W);
        for (int64_t s = 0; s < count; s++) {
            Floats row[J];
            for (int j = 0; j < J; j++) row[j] = counted(load(value + s * ldv + v + j * W));
            for (int line = 0; line < J * W * int(sizeof(T)); line += 64)  // prefetch the next tile
                __builtin_prefetch((const void*)(uintptr_t(value) + ((s + TILE) * ldv + v) * sizeof(T) + line), 0, 2);
            for (int i = 0; i < I; i++) for (int j = 0; j < J; j++) a[i][j] += p[i][s] * row[j];
        }
        for (int i = 0; i < I; i++) for (int j = 0; j < J; j++) *(Floats*)(y + i * y_head + v + j * W) = a[i][j];
        v += J * W;
    };
    auto all = [](Floats row) { return row; };
    while (v + 2 * W <= n_value) add.template operator()<2>(all);
    if (v + W <= n_value) add.template operator()<1>(all);
    if (int64_t left = n_value - v; left && n_value >= W)
        v = n_value - W, add.template operator()<1>([left](Floats row) { return last(row, left); });
    for (; v < n_value; v++)
        for (int i = 0; i < I; i++)
            for (int64_t s = 0; s < count; s++) y[i * y_head + v] += p[i][s] * number(value[s * ldv + v]);
}

// Each of `heads` KV heads is read once by each thread that takes some of its `group` query heads. w: keys of width k
// in rows of w_row, (b, h, rows); the last `scales` numbers of a row multiply the scores of as many parts of a group.
// w2: values of width n in rows of w2_row. x_head is the stride between heads of a group, x_kv that between groups.
template <class T> void attend(const Op& op, const Call& call, int64_t id, int64_t n) {
    int64_t units = call.batch * op.heads, parts = units >= n ? 1 : std::min(n, op.group);
    std::vector<float> top(op.group), total(op.group);
    for (int64_t unit = id; unit < units * parts; unit += n) {
        int64_t at = unit / parts, b = at / op.heads, h = at % op.heads;
        Share mine = share(op.group, 4, unit % parts, parts);
        int64_t used = std::min(call.positions[b] + 1, op.rows);
        const T* keys = (const T*)op.w + at * op.rows * op.w_row;
        const T* values = (const T*)op.w2 + at * op.rows * op.w2_row;
        const float* q = op.x + b * op.x_row + h * op.x_kv;
        float* y = op.y + b * op.y_row + h * op.y_kv;
        for (int64_t g = mine.from; g < mine.to; g++) {
            top[g] = -INFINITY, total[g] = 0;
            std::fill(y + g * op.y_head, y + g * op.y_head + op.n, 0.0f);
        }
        for (int64_t s = 0; s < used; s += TILE) {
            int64_t count = std::min(TILE, used - s);
            for (int64_t g = mine.from; g < mine.to;) {
                const T* scales[4];
                auto with = [&]<int I>() {
                    const T* row = keys + s * op.w_row;
                    for (int i = 0; op.scales && i < I; i++)
                        scales[i] = row + op.w_row - op.scales + (g + i) / (op.group / op.scales);
                    meet<I>(q + g * op.x_head, op.x_head, row, op.w_row, values + s * op.w2_row, op.w2_row, count, op.k, op.n,
                            float(op.scale), op.scales ? scales : nullptr, float(op.cap), &top[g], &total[g],
                            y + g * op.y_head, op.y_head);
                    g += I;
                };
                int64_t left = mine.to - g;
                if (left >= 4) with.template operator()<4>();
                else if (left >= 2) with.template operator()<2>();
                else with.template operator()<1>();
            }
        }
        for (int64_t g = mine.from; g < mine.to; g++)
            for (int64_t v = 0; v < op.n; v++) y[g * op.y_head + v] /= total[g];
    }
}

// One panel of I keys: latents of n numbers times (n, PANEL)
template <int I>
inline void product(const float* latents, int64_t n, const float* panel, const float* start, float* key, int64_t ldk) {
    constexpr int J = PANEL / W;
    Floats s[I][J];
    for (int i = 0; i < I; i++) for (int j = 0; j < J; j++) s[i][j] = load(start + j * W);
    for (int64_t r = 0; r < n; r++) {
        Floats row[J];
        for (int j = 0; j < J; j++) row[j] = load(panel + r * PANEL + j * W);
        for (int i = 0; i < I; i++) {
            float x = latents[i * n + r];
            for (int j = 0; j < J; j++) s[i][j] += x * row[j];
        }
    }
    for (int i = 0; i < I; i++) for (int j = 0; j < J; j++) *(Floats*)(key + i * ldk + j * W) = s[i][j];
}

// The keys of KV head h for `count` latents, in rows of `ld` numbers: with biases, normed
template <class T> void rebuild(const Op& op, const float* latents, int64_t count, int64_t h, float* keys, int64_t ld) {
    constexpr int I = SUMS * 2 / 3 / (PANEL / W);
    for (int64_t v = 0; v < op.k; v += PANEL) {
        const float* panel = (const float*)op.w2 + (h * ld + v) * op.n;
        float start[PANEL] = {};
        for (int64_t i = 0; op.b && i < std::min(PANEL, op.k - v); i++)
            start[i] = number(((const T*)op.b)[h * op.b_head + v + i]);
        int64_t s = 0;
        for (; s + I <= count; s += I) product<I>(latents + s * op.n, op.n, panel, start, keys + s * ld + v, ld);
        for (; s < count; s++) product<1>(latents + s * op.n, op.n, panel, start, keys + s * ld + v, ld);
    }
    for (int64_t s = 0; op.g && s < count; s++) {
        float *key = keys + s * ld, square = 0;
        for (int64_t i = 0; i < op.k; i++) square += key[i] * key[i];
        float scale = float(1 / std::sqrt(square / op.k + op.eps));
        for (int64_t i = 0; i < op.k; i++) key[i] *= scale * number(((const T*)op.g)[i]);
    }
}

// Attention over latents of n elements in rows of w_row, (b, rows): keys of width k are rebuilt with w2, panels of
// columns (heads, k / PANEL, n, PANEL), normed and rotated; latents are summed. For each part of the rows, y gets
// the sums of all query heads, the maxima of their scores and the totals of their weights, 0 for an empty part.
template <class T> void attend_rebuilt(const Op& op, const Call& call, int64_t id, int64_t n) {
    int64_t n_query = op.heads * op.group, ld = (op.k + PANEL - 1) / PANEL * PANEL;
    std::vector<float> unrotated(TILE * ld), keys(TILE * ld), latents(TILE * op.n);
    for (int64_t at = id; at < call.batch * PARTS; at += n) {
        int64_t b = at / PARTS, part = at % PARTS, position = call.positions[b];
        Share mine = share(std::min(position + 1, op.rows), TILE, part, PARTS);
        float *sums = op.y + b * op.y_row + part * n_query * (op.n + 2), *top = sums + n_query * op.n, *total = top + n_query;
        std::fill(total, total + n_query, 0.0f);
        if (mine.from == mine.to) continue;
        std::fill(sums, top, 0.0f), std::fill(top, total, -INFINITY);
        for (int64_t s = mine.from; s < mine.to; s += TILE) {
            int64_t count = std::min(TILE, mine.to - s);
            for (int64_t i = 0; i < count; i++) {
                const T* row = (const T*)op.w + (b * op.rows + s + i) * op.w_row;
                for (int64_t v = 0; v < op.n; v++) latents[i * op.n + v] = number(row[v]);
            }
            for (int64_t h = 0; h < op.heads; h++) {
                rebuild<T>(op, latents.data(), count, h, unrotated.data(), ld);
                for (int64_t i = 0; i < count; i++)
                    rotate_head(op, &unrotated[i * ld], &keys[i * ld], position - (position - s - i) % op.rows);
                for (int64_t g = h * op.group; g < (h + 1) * op.group;) {
                    auto with = [&]<int I>() {
                        meet<I>(op.x + b * op.x_row + g * op.x_head, op.x_head, keys.data(), ld, latents.data(), op.n, count,
                                op.k, op.n, float(op.scale), (const float* const*)nullptr, 0.0f, top + g, total + g,
                                sums + g * op.n, op.n);
                        g += I;
                    };
                    int64_t left = (h + 1) * op.group - g;
                    if (left >= 4) with.template operator()<4>();
                    else if (left >= 2) with.template operator()<2>();
                    else with.template operator()<1>();
                }
            }
        }
    }
}

// Joins the parts that attend_rebuilt left in x
void join(const Op& op, const Call& call, int64_t id, int64_t n) {
    for (int64_t at = id; at < call.batch * op.heads; at += n) {
        int64_t b = at / op.heads, h = at % op.heads, size = op.heads * (op.n + 2);
        const float *sums = op.x + b * op.x_row + h * op.n, *top = op.x + b * op.x_row + op.heads * op.n + h;
        const float* total = top + op.heads;
        float *y = op.y + b * op.y_row + h * op.y_head, high = -INFINITY, all = 0;
        for (int64_t i = 0; i < PARTS; i++) if (total[i * size]) high = std::max(high, top[i * size]);
        for (int64_t i = 0; i < PARTS; i++) if (total[i * size]) all += total[i * size] * std::exp(top[i * size] - high);
        std::fill(y, y + op.n, 0.0f);
        for (int64_t i = 0; i < PARTS; i++) {
            if (!total[i * size]) continue;
            float weight = std::exp(top[i * size] - high) / all;
            for (int64_t v = 0; v < op.n; v++) y[v] += sums[i * size + v] * weight;
        }
    }
}

void gate(const Op& op, const Call& call, int64_t id, int64_t n) {  // y = silu(y) x, or gelu(y) x
    for (int64_t b = 0; b < call.batch; b++) {
        Share mine = share(op.n, W, id, n);
        const float* up = op.x + b * op.x_row;
        float* y = op.y + b * op.y_row;
        int64_t i = mine.from;
        auto act = [&](Floats v) { return op.gelu ? gelu(v) : silu(v); };
        for (; i + W <= mine.to; i += W) *(Floats*)(y + i) = act(load(y + i)) * load(up + i);
        for (; i < mine.to; i++) y[i] = act(Floats{} + y[i])[0] * up[i];
    }
}

void scale(const Op& op, const Call& call, int64_t id, int64_t n) {  // y = scale x, or cap tanh(x / cap)
    Share mine = share(op.n, W, id, n);
    for (int64_t b = 0; b < call.batch; b++)
        for (int64_t i = mine.from; i < mine.to; i++) {
            float x = op.x[b * op.x_row + i];
            op.y[b * op.y_row + i] = op.cap ? op.cap * std::tanh(x / op.cap) : x * float(op.scale);
        }
}

template <class T> void one(const Op& op, const Call& call, int64_t id, int64_t n) {
    switch (op.kind) {
        case EMBED: return embed<T>(op, call, id, n);
        case NORM: return norm<T>(op, call, id, n);
        case LINEAR: return linear<T>(op, call, id, n);
        case EXPAND: return expand<T>(op, call, id, n);
        case ROTATE: return rotate(op, call, id, n);
        case STORE: return store_rows<T>(op, call, id, n);
        case ATTEND: return attend<T>(op, call, id, n);
        case GATE: return gate(op, call, id, n);
        case SCALE: return scale(op, call, id, n);
        case ATTEND_REBUILT: return attend_rebuilt<T>(op, call, id, n);
        case JOIN: return join(op, call, id, n);
        case INVERSE_RMS: return inverse_rms(op, call, id, n);
    }
}

// Barrier of the threads of a call: all continue when the last one arrives.
class Barrier {
  public:
    void meet(int64_t n) {
        if (n == 1) return;
        int64_t round = rounds.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
            arrived.store(0, std::memory_order_relaxed);
            rounds.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spin = 0; rounds.load(std::memory_order_acquire) == round; spin++)
            if (spin < 20000) pause(); else std::this_thread::yield();
    }

  private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    std::atomic<int64_t> arrived{0}, rounds{0};
};

}  // namespace

extern "C" {
int64_t op_size() { return sizeof(Op); }
// Returns 1 if a thread ran out of memory; the result is then meaningless
int64_t step(const Op* ops, int64_t n_op, const int64_t* ids, const int64_t* positions, int64_t batch, int64_t n_thread) {
    Call call{ids, positions, batch};
    Barrier barrier;
    std::atomic<int64_t> failed{0};
#pragma omp parallel num_threads(n_thread)
    {
        int64_t id = omp_get_thread_num(), n = omp_get_num_threads();
        for (int64_t i = 0; i < n_op; i++) {
            try {
                if (ops[i].bfloat16) one<Bfloat16>(ops[i], call, id, n);
                else one<float>(ops[i], call, id, n);
            } catch (const std::exception&) {  // bad_alloc or length_error; the other threads wait at the barriers
                failed = 1;
            }
            if (ops[i].sync) barrier.meet(n);
        }
    }
    return failed;
}
}
