// Whole sequences on a CPU, in float: attention of many queries and GELU, both with gradients.
//
// Attention processes one head and a tile of queries at a time: scores, softmax, dropout and sums stay in the processor's
// cache. Masked tiles are skipped; only the hidden keys of partly masked tiles are computed for nothing. The backward
// pass recomputes the weights from the saved log-sum-exp of the scores, and their dropout from the saved draws.
// Built by build.py.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <vector>
#include <omp.h>
#include "vectors.h"

namespace {

typedef uint16_t Draws __attribute__((vector_size(2 * W), aligned(2), may_alias));
constexpr int64_t PANEL = 64;   // keys in a packed panel
constexpr int64_t TILE = 32;    // queries in a tile
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline float largest(Floats v) { float m = v[0]; for (int i = 1; i < W; i++) m = std::max(m, v[i]); return m; }
inline int64_t whole(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c[i][n] (+)= sum over k of a[i, k] b[k][n], for I rows and J vectors; a may be row- or column-major.
template <int I, int J>
inline void corner(const float* a, int64_t a_i, int64_t a_k, const float* b, int64_t b_k, float* c, int64_t c_i,
                   int64_t n_k, bool more) {
    Floats s[I][J] = {};
    for (int64_t k = 0; k < n_k; k++) {
        Floats row[J];
        for (int j = 0; j < J; j++) row[j] = load(b + k * b_k + j * W);
        for (int i = 0; i < I; i++) {
            float x = a[i * a_i + k * a_k];
            for (int j = 0; j < J; j++) s[i][j] += x * row[j];
        }
    }
    for (int i = 0; i < I; i++)
        for (int j = 0; j < J; j++) {
            Floats* to = (Floats*)(c + i * c_i + j * W);
            *to = more ? *to + s[i][j] : s[i][j];
        }
}

template <int J>
inline void rows(int64_t n_i, const float* a, int64_t a_i, int64_t a_k, const float* b, int64_t b_k, float* c,
                 int64_t c_i, int64_t n_k, bool more) {
    int64_t i = 0;
    for (; i + 6 <= n_i; i += 6) corner<6, J>(a + i * a_i, a_i, a_k, b, b_k, c + i * c_i, c_i, n_k, more);
    for (; i + 2 <= n_i; i += 2) corner<2, J>(a + i * a_i, a_i, a_k, b, b_k, c + i * c_i, c_i, n_k, more);
    for (; i < n_i; i++) corner<1, J>(a + i * a_i, a_i, a_k, b, b_k, c + i * c_i, c_i, n_k, more);
}

// c (+)= a b, for n_i rows and n_n columns; n_n is a multiple of W
void product(int64_t n_i, int64_t n_n, int64_t n_k, const float* a, int64_t a_i, int64_t a_k, const float* b,
             int64_t b_k, float* c, int64_t c_i, bool more) {
    int64_t n = 0;
    if constexpr (6 * 4 <= SUMS)
        for (; n + 4 * W <= n_n; n += 4 * W) rows<4>(n_i, a, a_i, a_k, b + n, b_k, c + n, c_i, n_k, more);
    while (n + 2 * W <= n_n) { rows<2>(n_i, a, a_i, a_k, b + n, b_k, c + n, c_i, n_k, more); n += 2 * W; }
    if (n < n_n) rows<1>(n_i, a, a_i, a_k, b + n, b_k, c + n, c_i, n_k, more);
}

struct Array { float* data; int64_t batch, time, head; };  // (B, L, H, E) with strides; the last axis is contiguous

struct Sizes {
    int64_t n_batch, n_query, n_key, n_head, group, n_kv, width, n_value;  // group: query heads per KV head; n_kv: KV heads
    int64_t causal, window;          // window: keys a query sees, its own included; 0: all
    int64_t drawn, dropped;          // draws per query, 0 without dropout; a draw below `dropped` drops its weight
    double scale;
};

struct Seen { int64_t from, to; };  // the visible keys of query i: [from, to)
inline Seen seen(const Sizes& n, int64_t i) {
    if (!n.causal) return {0, n.n_key};
    int64_t to = i + n.n_key - n.n_query + 1;
    return {n.window ? std::max<int64_t>(0, to - n.window) : 0, to};
}

typedef std::vector<float> Buffer;

void copy(const float* from, int64_t step, int64_t n, int64_t width, float* to, int64_t padded) {
    for (int64_t i = 0; i < n; i++) {
        std::memcpy(to + i * padded, from + i * step, width * sizeof(float));
        std::fill(to + i * padded + width, to + (i + 1) * padded, 0.0f);
    }
}
void add(const float* from, int64_t padded, int64_t n, int64_t width, float* to, int64_t step) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t e = 0; e < width; e++) to[i * step + e] += from[i * padded + e];
}
// Run `work` of one thread of a parallel region, which no exception may leave: bad_alloc or length_error sets `failed`.
template <class F> inline void guarded(std::atomic<int64_t>& failed, F work) {
    if (failed) return;
    try { work(); } catch (const std::exception&) { failed = 1; }
}
// Pack columns [0, width) of n rows into panels of PANEL rows, transposed; the last panel is padded with 0
void panels(const float* from, int64_t step, int64_t n, int64_t width, float* to) {
    for (int64_t start = 0; start < n; start += PANEL, to += width * PANEL) {
        int64_t some = std::min(PANEL, n - start);
        if (some < PANEL) std::fill(to, to + width * PANEL, 0.0f);
        for (int64_t i = 0; i < some; i++)
            for (int64_t e = 0; e < width; e++) to[e * PANEL + i] = from[(start + i) * step + e];
    }
}

// out = x panels, for the keys [from, to) of the panels; `from` is a multiple of PANEL
void against(int64_t n_i, const float* x, int64_t x_i, const float* packed, int64_t width, int64_t from, int64_t to,
             float* out, int64_t out_i) {
    for (int64_t key = from; key < to; key += PANEL)
        product(n_i, std::min(PANEL, whole(to - key, W)), width, x, x_i, 1, packed + key * width, PANEL,
                out + key - from, out_i, false);
}

// Mask of all ones where a weight is kept, for W of a query's `draws`, starting at index `at`.
inline Integers kept(const uint16_t* draws, int64_t at, int64_t n_drawn, int64_t dropped) {
    Integers found;
    if (at >= 0 && at + W <= n_drawn) {
        found = __builtin_convertvector(*(const Draws*)(draws + at), Integers) & 0x7fff;
    } else {
        for (int64_t j = 0; j < W; j++) found[j] = at + j >= 0 && at + j < n_drawn ? draws[at + j] & 0x7fff : 0;
    }
    return found >= int32_t(dropped);
}

// One tile: queries [begin, begin + n) over keys [from, to); `from` is a multiple of PANEL
struct Tile { int64_t begin, n, from, to, columns; };
inline Tile tile(const Sizes& n, int64_t begin) {
    int64_t some = std::min(TILE, n.n_query - begin);
    int64_t from = seen(n, begin).from / PANEL * PANEL, to = seen(n, begin + some - 1).to;
    return {begin, some, from, to, whole(to - from, W)};
}
// Number of queries that share packed keys; with a window, few enough for the keys to stay in the cache
inline int64_t segment(const Sizes& n) {
    return n.causal && n.window ? std::max<int64_t>(256, whole(2 * n.window, TILE)) : whole(n.n_query, TILE);
}
// The keys visible to queries [begin, end), starting at a multiple of PANEL
inline Seen keys_of(const Sizes& n, int64_t begin, int64_t end) {
    return {seen(n, begin).from / PANEL * PANEL, seen(n, end - 1).to};
}
inline int64_t most_keys(const Sizes& n) {
    return n.causal && n.window ? std::min(n.n_key, segment(n) + n.window + PANEL) : n.n_key;
}
inline int64_t widest(const Sizes& n) {
    return std::min(whole(n.n_key, W), n.causal && n.window ? whole(n.window + TILE + 2 * PANEL, W) : whole(n.n_key, W)) + W;
}

// Attention of queries [first, last) of one head; packed keys and values start at key `base`.
void forward_head(const Sizes& n, const uint16_t* draws, const float* keys, const float* values, int64_t base, int64_t V,
                  const float* query, int64_t query_time, float* out, int64_t out_time, float* logs, Buffer& scratch,
                  int64_t first, int64_t last) {
    int64_t across = widest(n), E = whole(n.width, W);
    scratch.resize(TILE * (across + E + V));
    float *scores = scratch.data(), *asked = scores + TILE * across, *gathered = asked + TILE * E;
    float scale = float(n.scale), grown = 32768.0f / float(32768 - n.dropped);
    for (int64_t begin = first; begin < last; begin += TILE) {
        Tile t = tile(n, begin);
        copy(query + begin * query_time, query_time, t.n, n.width, asked, E);
        against(t.n, asked, E, keys, n.width, t.from - base, t.to - base, scores, across);
        float shrink[TILE];
        for (int64_t i = 0; i < t.n; i++) {
            Seen s = seen(n, begin + i);
            float* row = scores + i * across;
            int32_t from = int32_t(s.from - t.from), to = int32_t(s.to - t.from);
            Floats high = Floats{} + NEVER;
            for (int64_t j = 0; j < t.columns; j += W) {
                Integers at = COUNT + int32_t(j);
                Floats x = (at >= from) & (at < to) ? load(row + j) * scale : Floats{} + NEVER;
                *(Floats*)(row + j) = x;
                high = x > high ? x : high;
            }
            float most = largest(high);
            Floats total = {};
            for (int64_t j = 0; j < t.columns; j += W) {
                Integers at = COUNT + int32_t(j);
                Floats p = (at >= from) & (at < to) ? exponential(load(row + j) - most) : Floats{};
                total += p;
                if (n.drawn) p = kept(draws + (begin + i) * n.drawn, j - from, n.drawn, n.dropped) ? p : Floats{};
                *(Floats*)(row + j) = p;
            }
            float all = sum(total);
            shrink[i] = (n.drawn ? grown : 1.0f) / all;
            logs[begin + i] = most + std::log(all);
        }
        product(t.n, V, t.to - t.from, scores, across, 1, values + (t.from - base) * V, V, gathered, V, false);
        for (int64_t i = 0; i < t.n; i++)
            for (int64_t v = 0; v < n.n_value; v++) out[(begin + i) * out_time + v] = gathered[i * V + v] * shrink[i];
    }
}

struct Packed { int64_t base; Buffer key, value, key_panels, value_panels; };

// Gradients of queries [first, last) of one head; adds to the gradients of keys and values from key `base` on.
void backward_head(const Sizes& n, const uint16_t* draws, const Packed& packed, int64_t E, int64_t V, const float* query,
                   int64_t query_time, const float* out, int64_t out_time, const float* upstream, int64_t up_time,
                   const float* logs, float* to_query, int64_t to_query_time, float* to_key, float* to_value,
                   Buffer& scratch, int64_t first, int64_t last) {
    int64_t across = widest(n);
    scratch.resize(TILE * (2 * across + 2 * E + V));
    float *scores = scratch.data(), *used = scores + TILE * across, *asked = used + TILE * across;
    float *found = asked + TILE * E, *above = found + TILE * E;
    float scale = float(n.scale), grown = n.drawn ? 32768.0f / float(32768 - n.dropped) : 1.0f;
    for (int64_t begin = first; begin < last; begin += TILE) {
        Tile t = tile(n, begin);
        copy(query + begin * query_time, query_time, t.n, n.width, asked, E);
        copy(upstream + begin * up_time, up_time, t.n, n.n_value, above, V);
        against(t.n, asked, E, packed.key_panels.data(), n.width, t.from - packed.base, t.to - packed.base, scores, across);
        against(t.n, above, V, packed.value_panels.data(), n.n_value, t.from - packed.base, t.to - packed.base, used, across);
        for (int64_t i = 0; i < t.n; i++) {
            Seen s = seen(n, begin + i);
            float *p_row = scores + i * across, *u_row = used + i * across, mean = 0;
            const float *o = out + (begin + i) * out_time, *g = above + i * V;
            for (int64_t v = 0; v < n.n_value; v++) mean += o[v] * g[v];
            int32_t from = int32_t(s.from - t.from), to = int32_t(s.to - t.from);
            float log = logs[begin + i];
            for (int64_t j = 0; j < t.columns; j += W) {
                Integers at = COUNT + int32_t(j);
                Floats p = (at >= from) & (at < to) ? exponential(load(p_row + j) * scale - log) : Floats{};
                Floats kept_p = p * grown;
                if (n.drawn) kept_p = kept(draws + (begin + i) * n.drawn, j - from, n.drawn, n.dropped) ? kept_p : Floats{};
                *(Floats*)(p_row + j) = (kept_p * load(u_row + j) - p * mean) * scale;  // gradient of q k
                *(Floats*)(u_row + j) = kept_p;
            }
        }
        int64_t n_key = t.to - t.from, at = t.from - packed.base;
        product(t.n, E, n_key, scores, across, 1, packed.key.data() + at * E, E, found, E, false);
        for (int64_t i = 0; i < t.n; i++)
            std::memcpy(to_query + (begin + i) * to_query_time, found + i * E, n.width * sizeof(float));
        product(n_key, E, t.n, scores, 1, across, asked, E, to_key + at * E, E, true);
        product(n_key, V, t.n, used, 1, across, above, V, to_value + at * V, V, true);
    }
}

inline float* at(const Array& x, int64_t b, int64_t h) { return x.data + b * x.batch + h * x.head; }

// Derivative of `gelu`
inline Floats gelu_slope(Floats x) {
    Floats square = x * x, s = 1 / (1 + exponential(-OUTER * (x + INNER * x * square)));
    return s + x * s * (1 - s) * OUTER * (1 + 3 * INNER * square);
}
// y = f(x, up) for n elements, one vector at a time; a null `up` is passed as zeros
template <class F> void each(const float* x, const float* up, float* y, int64_t n, int64_t n_thread, F f) {
    int64_t n_vector = n / W, rest = n % W;
#pragma omp parallel for num_threads(n_thread)
    for (int64_t i = 0; i < n_vector; i++) *(Floats*)(y + i * W) = f(load(x + i * W), up ? load(up + i * W) : Floats{});
    if (!rest) return;
    Floats last = {}, last_up = {};
    std::memcpy(&last, x + n_vector * W, rest * sizeof(float));
    if (up) std::memcpy(&last_up, up + n_vector * W, rest * sizeof(float));
    Floats found = f(last, last_up);
    std::memcpy(y + n_vector * W, &found, rest * sizeof(float));
}
}  // namespace

extern "C" {
int64_t sizes_size() { return sizeof(Sizes); }

void gelu_forward(const float* x, float* y, int64_t n, int64_t n_thread) {
    each(x, nullptr, y, n, n_thread, [](Floats v, Floats) { return gelu(v); });
}

void gelu_backward(const float* x, const float* up, float* to_x, int64_t n, int64_t n_thread) {
    each(x, up, to_x, n, n_thread, [](Floats v, Floats above) { return above * gelu_slope(v); });
}

// draws: (B, H, L, drawn), 16 bits of which 15 are used, for each query's keys from the first visible one. logs: (B, H, L)
// Returns 1 if a thread ran out of memory; the result is then meaningless.
int64_t attend_forward(const Sizes* sizes, const Array* query, const Array* key, const Array* value, const uint16_t* draws,
                    const Array* out, float* logs, int64_t n_thread) {
    const Sizes& n = *sizes;
    int64_t V = whole(n.n_value, W), room = whole(most_keys(n), PANEL), n_pair = n.n_batch * n.n_kv;
    if (!n_pair || !n.n_query) return 0;
    int64_t tiles = (n.n_query + TILE - 1) / TILE;
    int64_t n_part = std::min(tiles, std::max(4 * n_thread / n_pair, (n.n_query + segment(n) - 1) / segment(n)));
    std::atomic<int64_t> failed{0};
#pragma omp parallel num_threads(n_thread)
    {
        Buffer keys, values, scratch;
        guarded(failed, [&] { keys.resize(room * n.width), values.resize(room * V); });
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < n_pair * n_part; task++) guarded(failed, [&] {
            int64_t pair = task / n_part, part = task % n_part, b = pair / n.n_kv, k = pair % n.n_kv;
            int64_t first = tiles * part / n_part * TILE, last = std::min(n.n_query, tiles * (part + 1) / n_part * TILE);
            Seen some = keys_of(n, first, last);
            panels(at(*key, b, k) + some.from * key->time, key->time, some.to - some.from, n.width, keys.data());
            copy(at(*value, b, k) + some.from * value->time, value->time, some.to - some.from, n.n_value, values.data(), V);
            for (int64_t g = 0; g < n.group; g++) {
                int64_t h = k * n.group + g, row = (b * n.n_head + h) * n.n_query;
                forward_head(n, draws + row * n.drawn, keys.data(), values.data(), some.from, V, at(*query, b, h),
                             query->time, at(*out, b, h), out->time, logs + row, scratch, first, last);
            }
        });
    }
    return failed;
}

// Adds to the gradients of keys and values, which the caller initialises to 0. Returns 1 as attend_forward does.
int64_t attend_backward(const Sizes* sizes, const Array* query, const Array* key, const Array* value, const uint16_t* draws,
                     const Array* out, const Array* upstream, const float* logs, const Array* to_query,
                     const Array* to_key, const Array* to_value, int64_t n_thread) {
    const Sizes& n = *sizes;
    int64_t E = whole(n.width, W), V = whole(n.n_value, W), room = whole(most_keys(n), PANEL), together = segment(n);
    if (!n.n_query) return 0;
    std::atomic<int64_t> failed{0};
#pragma omp parallel num_threads(n_thread)
    {
        Packed packed{};
        Buffer scratch, of_key, of_value;
        guarded(failed, [&] {
            packed = {0, Buffer(room * E), Buffer(room * V), Buffer(room * n.width), Buffer(room * n.n_value)};
            of_key.resize(room * E), of_value.resize(room * V);
        });
#pragma omp for schedule(dynamic)
        for (int64_t pair = 0; pair < n.n_batch * n.n_kv; pair++) guarded(failed, [&] {
            int64_t b = pair / n.n_kv, k = pair % n.n_kv;
            for (int64_t first = 0; first < n.n_query; first += together) {
                int64_t last = std::min(n.n_query, first + together);
                Seen some = keys_of(n, first, last);
                int64_t n_key = some.to - some.from;
                packed.base = some.from;
                copy(at(*key, b, k) + some.from * key->time, key->time, n_key, n.width, packed.key.data(), E);
                copy(at(*value, b, k) + some.from * value->time, value->time, n_key, n.n_value, packed.value.data(), V);
                panels(packed.key.data(), E, n_key, n.width, packed.key_panels.data());
                panels(packed.value.data(), V, n_key, n.n_value, packed.value_panels.data());
                std::fill(of_key.begin(), of_key.begin() + n_key * E, 0.0f);
                std::fill(of_value.begin(), of_value.begin() + n_key * V, 0.0f);
                for (int64_t g = 0; g < n.group; g++) {
                    int64_t h = k * n.group + g, row = (b * n.n_head + h) * n.n_query;
                    backward_head(n, draws + row * n.drawn, packed, E, V, at(*query, b, h), query->time, at(*out, b, h),
                                  out->time, at(*upstream, b, h), upstream->time, logs + row, at(*to_query, b, h),
                                  to_query->time, of_key.data(), of_value.data(), scratch, first, last);
                }
                add(of_key.data(), E, n_key, n.width, at(*to_key, b, k) + some.from * to_key->time, to_key->time);
                add(of_value.data(), V, n_key, n.n_value, at(*to_value, b, k) + some.from * to_value->time, to_value->time);
            }
        });
    }
    return failed;
}
}
