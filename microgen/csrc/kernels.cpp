// The compiled CPU kernels: one file with a plain C interface, explained piece by piece in nbs/06a_kernels.ipynb.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>
#if defined __AVX2__ || defined __F16C__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define VNNI
#endif
#if defined VNNI && defined __AMX_INT8__ && defined __AMX_BF16__ && defined __AVX512BF16__ && defined __linux__
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
typedef int64_t i64;

// ---- vectors ----
constexpr int VL = 8;   // lanes of a float vector; the compiler splits it where registers are narrower
typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef int8_t vb __attribute__((vector_size(VL)));
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class V> inline V raw(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
inline uint32_t bits(float x) { return raw<uint32_t>(&x); }
inline float value(uint32_t b) { return raw<float>(&b); }
inline float wide(float x) { return x; }
inline float wide(int8_t x) { return x; }
inline float wide(bf16 x) { return value(uint32_t(x.bits) << 16); }
inline float wide(f16 x) {
#ifdef __F16C__
    return _cvtsh_ss(x.bits);
#endif
    uint32_t m = uint32_t(x.bits & 0x7fff) << 13;
    float v = (x.bits & 0x7c00) == 0x7c00 ? value(m | 0x7f800000) : value(m) * 0x1p112f;
    return x.bits & 0x8000 ? -v : v;
}
inline f16 half(float x) {         // round to nearest even
#ifdef __F16C__
    return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#endif
    uint32_t sign = bits(x) >> 16 & 0x8000, b = bits(x) & 0x7fffffff;
    if (b > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (b >= 0x477ff000) return {uint16_t(sign | 0x7c00)};                             // 65520 and more
    if (b < 0x38800000) return {uint16_t(sign | int(std::rint(value(b) * 0x1p24f)))};  // below 2^-14
    return {uint16_t(sign | (b + 0xfff + (b >> 13 & 1) - (112u << 23)) >> 13)};
}
inline vf load(const float* p) { return raw<vf>(p); }
#ifdef __AVX2__
inline vf load(const bf16* p) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16); }
inline vf load(const int8_t* p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline float sum(vf v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
#else
inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(raw<vh>(p), vi) << 16); }
inline vf load(const int8_t* p) { return __builtin_convertvector(raw<vb>(p), vf); }
inline float sum(vf v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
#endif
#ifdef VNNI
constexpr int WL = 16;  // lanes of the widest vector
typedef float vw __attribute__((vector_size(4 * WL)));
inline vw load_wide(const float* p) { return raw<vw>(p); }
inline vw load_wide(const bf16* p) { return (vw)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw<__m256i>(p)), 16); }
inline vw load_wide(const int8_t* p) { return (vw)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw<__m128i>(p))); }
inline float sum(vw v) { return _mm512_reduce_add_ps((__m512)v); }
inline void store(float* p, vw v) { memcpy(p, &v, sizeof v); }
#else
constexpr int WL = VL;
typedef vf vw;
template <class T> inline vw load_wide(const T* p) { return load(p); }
#endif
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

enum Dtype { F32, BF16 };
inline void put(void* y, int dtype, i64 i, float v) {   // round to nearest even
    uint32_t b = bits(v);
    if (dtype == F32) ((float*)y)[i] = v;
    else ((uint16_t*)y)[i] = v != v ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline void widen(const void* x, int dtype, i64 first, i64 n, float* out) {
    for (i64 i = 0; i < n; i++) out[i] = dtype == F32 ? ((const float*)x)[first + i] : wide(((const bf16*)x)[first + i]);
}

// ---- threads ----
// Threads that are called once and then do loop after loop: between two of them they look out for the next, and do not go to sleep.
struct Team {
    typedef void (*Share)(const void* work, int me, int size);
    int size = 1;
    Share share = nullptr;
    const void* work = nullptr;
    std::atomic<i64> loops{0}, done{0};

    template <class C> static void wait(C come) {
        for (i64 turns = 0; !come(); turns++)
            if (turns > 4000) std::this_thread::yield();          // somebody else needs the core
#if defined __x86_64__
            else __builtin_ia32_pause();
#elif defined __aarch64__
            else asm volatile("yield");
#endif
    }
    void lead(Share s, const void* w) {                            // nullptr: go home
        share = s, work = w;
        done.store(0, std::memory_order_relaxed);
        loops.fetch_add(1, std::memory_order_release);
        if (s) s(w, 0, size);
        wait([&] { return done.load(std::memory_order_acquire) == size - 1; });
    }
    void follow(int me) {
        for (i64 seen = 0;; seen++) {
            wait([&] { return loops.load(std::memory_order_acquire) > seen; });
            Share mine = share;                                    // the next one may come as soon as this is done
            if (mine) mine(work, me, size);
            done.fetch_add(1, std::memory_order_release);
            if (!mine) return;
        }
    }
};
static thread_local Team* team = nullptr;   // whom this thread leads

// Give each thread one contiguous run of 0 ... n-1, in units that stay together.
template <class F> void split(i64 n, i64 unit, int threads, F work) {
    auto share = [&](int me, int size) {
        i64 units = (n + unit - 1) / unit, first = units * me / size * unit, last = std::min(n, units * (me + 1) / size * unit);
        if (first < last) work(first, last);
    };
    if (threads > 1 && n > unit) {
        if (team) return team->lead([](const void* s, int me, int size) { (*(const decltype(share)*)s)(me, size); }, &share);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        share(omp_get_thread_num(), omp_get_num_threads());
        return;
#endif
    }
    if (n > 0) work(0, n);
}
// Do `all`, whose loops are shared by a team.
template <class F> void together(int threads, F all) {
    if (threads == 1) return all();
#ifdef _OPENMP
    Team own;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        own.size = omp_get_num_threads();
        if (omp_get_thread_num()) own.follow(omp_get_thread_num());
        else {
            team = own.size > 1 ? &own : nullptr;
            all();
            if (team) team->lead(nullptr, nullptr);
            team = nullptr;
        }
    }
#else
    all();
#endif
}
template <class T> T* scratch(std::vector<T>& held, i64 n) {
    if (i64(held.size()) < n) held.resize(n);
    return held.data();
}
// x as float32 [n]: itself, or a copy that lives until the next call in this thread.
inline const float* floats(const void* x, int dtype, i64 n) {
    static thread_local std::vector<float> held;
    if (dtype == F32) return (const float*)x;
    widen(x, dtype, 0, n, scratch(held, n));
    return held.data();
}

// ---- tiles ----
#define SEPARATE __attribute__((noinline))   // a function of its own gets the registers to itself
constexpr i64 TILE = 64 << 10;   // bytes of weights that wait in the cache while all rows pass over them

inline void fetch(const void* p, i64 bytes) {   // ask for what will be read soon
    for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i);
}
// R rows of activations from row r on, against the weights of outputs c ... end-1. Each block asks, a little at a time, for the weights of the next.
template <int R, int C, class K> void strip(const K& kernel, i64 r, i64 c, i64 end) {
    for (; c + C <= end; c += C) kernel.template block<R, C>(r, c);
    for (; c < end; c++)
        for (int i = 0; i < R; i++) kernel.template block<1, 1>(r + i, c);
}
template <class K> void tiles(const K& kernel, i64 n, i64 out, i64 row_bytes, int threads) {
    i64 tile = std::max<i64>(4, TILE / std::max<i64>(row_bytes, 1) / 4 * 4);
    split(out, 4, threads, [&](i64 first, i64 last) {
        for (i64 t = first; t < last; t += tile)
            for (i64 r = 0, end = std::min(last, t + tile); r < n;)
                if (n - r >= 4) strip<4, 2>(kernel, r, t, end), r += 4;
                else if (n - r >= 2) strip<2, 4>(kernel, r, t, end), r += 2;
                else strip<1, 4>(kernel, r, t, end), r += 1;
    });
}

// ---- panels ----
constexpr int PANEL = 2 * VL;    // rows that lie side by side
#ifdef __AVX2__
#define IN_TURN(a, b) asm volatile("" : "+x"(a), "+x"(b))   // or the compiler fetches so much ahead that it runs out of registers
#endif
inline void transpose(vf* v) {   // eight vectors, the rows of a square, become its columns
#ifdef __AVX2__
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int j = 0; j < 4; j++) {
        v[j] = (vf)_mm256_permute2f128_ps(u[j], u[j + 4], 0x20);
        v[j + 4] = (vf)_mm256_permute2f128_ps(u[j], u[j + 4], 0x31);
    }
#else
    vf t[VL];
    std::copy(v, v + VL, t);
    for (int i = 0; i < VL; i++)
        for (int j = 0; j < VL; j++) v[i][j] = t[j][i];
#endif
}
// Words of 32 bits of `PANEL` rows, side by side: word i of all of them, then word i + 1. Rows from `count` on are copies of the last.
template <class F> void pack(i64 words, i64 count, float* p, F eight) {   // eight(row, i): words i ... i + 7 of a row
    for (i64 i = 0; i < words; i += VL)
        for (int half = 0; half < PANEL; half += VL) {
            vf v[VL];
            for (int c = 0; c < VL; c++) v[c] = eight(std::min<i64>(half + c, count - 1), i);
            transpose(v);
            for (int j = 0; j < VL; j++) store(p + (i + j) * PANEL + half, v[j]);
        }
}
// R rows of k numbers, `stride` from row to row, against a panel of floats: `PANEL` products for each row, `room` from row to row of `out`.
template <int R> inline void multiply(const float* x, i64 stride, const float* p, i64 k, float* out, i64 room) {
    constexpr int C = PANEL / WL;
    vw acc[R][C] = {};
    for (i64 i = 0; i < k; i++) {
        vw w[C];
        for (int c = 0; c < C; c++) w[c] = load_wide(p + i * PANEL + c * WL);
        for (int r = 0; r < R; r++) { float xv = x[r * stride + i]; for (int c = 0; c < C; c++) acc[r][c] += xv * w[c]; }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * room + c * WL, acc[r][c]);
}
constexpr int HIGH = WL == VL ? 6 : 12;   // rows that meet a panel at once: what the registers hold
// All rows against `PANEL` outputs at a time. Some panels wait in the cache while the rows pass over them.
template <class K> void panels(const K& kernel, i64 n, i64 words, i64 out, int threads) {
    i64 tile = std::max<i64>(1, 3 * TILE / (sizeof(float) * words * PANEL)) * PANEL;
    split(out, PANEL, threads, [&](i64 first, i64 last) {
        static thread_local std::vector<float> held;
        float* p = scratch(held, words * tile);
        for (i64 t = first; t < last; t += tile) {
            i64 end = std::min(last, t + tile);
            auto each = [&](auto work) { for (i64 c = t; c < end; c += PANEL) work(c, std::min<i64>(PANEL, end - c), p + (c - t) * words); };
            each([&](i64 c, i64 count, float* part) { kernel.pack(c, count, part); });
            for (i64 r = 0; r < n;)
                if (n - r >= HIGH) each([&](i64 c, i64 count, float* part) { kernel.template panel<HIGH>(r, c, count, part); }), r += HIGH;
                else if (n - r >= 6) each([&](i64 c, i64 count, float* part) { kernel.template panel<6>(r, c, count, part); }), r += 6;
                else if (n - r >= 2) each([&](i64 c, i64 count, float* part) { kernel.template panel<2>(r, c, count, part); }), r += 2;
                else each([&](i64 c, i64 count, float* part) { kernel.template panel<1>(r, c, count, part); }), r += 1;
        }
    });
}
// Few rows meet the weights as they lie. From `many` on it pays to rearrange them (`words` of 32 bits for each output), where a kernel can.
template <class K> void product(const K& kernel, i64 n, i64 out, i64 row_bytes, i64 words, int threads) {
    if constexpr (K::many > 0) if (n >= K::many) return panels(kernel, n, (words + VL - 1) / VL * VL, out, threads);
    tiles(kernel, n, out, row_bytes, threads);
}

// ---- matrix units ----
constexpr i64 SQUARE = 32, ENOUGH = 8;          // rows and outputs of one product; rows from which it pays
#ifdef AMX
static std::atomic<bool> has_units{syscall(SYS_arch_prctl, 0x1023, 18) == 0};   // Linux wants to be asked for the registers
// Eight registers of 16 rows of 64 bytes, for as long as this lives.
struct Units {
    struct alignas(64) Shape { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } before;
    static constexpr uint8_t NONE = 255;
    Units() : before{NONE, 0, {}, {}, {}} {
        if (!has_units) return;
        Shape shape = {1, 0, {}, {}, {}};
        std::fill(shape.bytes, shape.bytes + 8, 64), std::fill(shape.rows, shape.rows + 8, 16);
        _tile_storeconfig(&before);
        asm volatile("" : "+m"(before), "+m"(shape));                  // GCC's tile instructions do not tell all the memory that they touch
        _tile_loadconfig(&shape);
    }
    ~Units() { if (before.palette != NONE) _tile_loadconfig(&before); }
};
// Four of them are the sums of 32 rows and 32 columns: the product of rows as they lie, `stride` bytes from row to row, with two panels,
// `next` words from one to the other, that hold words of four int8, or of two bfloat16. Rows or panels may be sums of two, `rows2` or `p2`
// behind the first. The rows that come after are asked for.
template <bool INT, int PARTS> inline void square_product(const void* rows, i64 stride, i64 rows2, const float* p, i64 next, i64 p2, i64 bytes) {
    const char *a = (const char*)rows, *b = a + 16 * stride;
    const float* q = p + next;
    asm volatile("" :: "r"(rows), "r"(p) : "memory");                  // what they read is written by now
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (i64 i = 0; i < bytes; i += 64) {
        if (stride == bytes) fetch(a + SQUARE * (bytes + i), SQUARE * 64);
        for (i64 part = 0; part < PARTS; part++) {
            i64 at = i + part * rows2, word = i * 4 + part * p2;
            _tile_loadd(4, a + at, stride); _tile_loadd(6, p + word, 64); _tile_loadd(5, b + at, stride); _tile_loadd(7, q + word, 64);
            if (INT) { _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 5, 6); _tile_dpbssd(2, 4, 7); _tile_dpbssd(3, 5, 7); }
            else { _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 5, 6); _tile_dpbf16ps(2, 4, 7); _tile_dpbf16ps(3, 5, 7); }
        }
    }
}
inline void square_store(float* sums, i64 stride) {
    _tile_stored(0, sums, 4 * stride); _tile_stored(1, sums + 16 * stride, 4 * stride);
    _tile_stored(2, sums + 16, 4 * stride); _tile_stored(3, sums + 16 * stride + 16, 4 * stride);
}
// n floats (a multiple of sixteen) as sums of two bfloat16, which have sixteen of their bits. Of an infinity, nothing is left.
inline void in_two(const float* x, i64 n, bf16* high, bf16* low) {
    for (i64 i = 0; i < n; i += WL) {
        vw v = load_wide(x + i);
        __m256bh h = _mm512_cvtneps_pbh((__m512)v);
        memcpy(high + i, &h, sizeof h);
        vw left = v - load_wide(high + i);
        h = _mm512_cvtneps_pbh((__m512)(left - left == 0.f ? left : vw{}));
        memcpy(low + i, &h, sizeof h);
    }
}
#else
static std::atomic<bool> has_units{false};
struct Units {};
template <bool, int> inline void square_product(const void*, i64, i64, const float*, i64, i64, i64) {}
inline void square_store(float*, i64) {}
inline void in_two(const float*, i64, bf16*, bf16*) {}
#endif
// Are there matrix units, and may they be used? (-1: only tell.) And would a product of n rows and `out` rows of weights be theirs?
extern "C" int matrix_units(int use) {
    static const bool there = has_units;
    if (use >= 0) has_units = use && there;
    return has_units;
}
inline bool units_serve(i64 n, i64 bytes, i64 out) { return has_units && n >= ENOUGH && out >= SQUARE && bytes && bytes % 64 == 0; }

// n rows of activations as panels; row(r), which is called once for each: where its `bytes` are.
template <class F> const float* row_panels(i64 n, i64 bytes, int threads, F row) {
    static thread_local std::vector<float> held;
    float* p = scratch(held, (n + SQUARE - 1) / SQUARE * SQUARE * (bytes / 4));
    split(n, SQUARE, threads, [=](i64 first, i64 last) {
        for (i64 r = first; r < (last + SQUARE - 1) / SQUARE * SQUARE; r += PANEL) {
            const char* rows[PANEL];
            for (i64 i = 0; i < PANEL; i++) rows[i] = r + i < last ? (const char*)row(r + i) : rows[0];
            if (r < last) pack(bytes / 4, PANEL, p + r * (bytes / 4), [&](i64 c, i64 i) { return raw<vf>(rows[c] + 4 * i); });
        }
    });
    return p;
}
// All rows against 32 outputs at a time; weights(first, end): where the first of these is; finish(row, output, how many, their sums).
template <bool INT, int PARTS, class W, class F> void squares(W weights, i64 bytes, i64 out, const float* x, i64 n, int threads, F finish) {
    i64 tile = std::max<i64>(1, 4 * TILE / bytes / SQUARE) * SQUARE;
    split(out, SQUARE, threads, [&](i64 first, i64 last) {
        Units units;
        alignas(64) float sums[SQUARE][SQUARE], turned[SQUARE][SQUARE];
        for (i64 t = first; t < last; t += tile) {
            i64 end = std::min(last, t + tile), start = std::min(t, out - SQUARE);             // the last ones with some before them
            const char* w = (const char*)weights(start, std::max(end, start + SQUARE));
            for (i64 r = 0; r < n; r += SQUARE)
                for (i64 c = t; c < end; c += SQUARE) {
                    i64 from = std::min(c, out - SQUARE), count = std::min(SQUARE, end - c);
                    square_product<INT, PARTS>(w + (from - start) * bytes, bytes, 0, x + r * PARTS * (bytes / 4), PARTS * bytes / 4 * PANEL, bytes / 4 * PANEL, bytes);
                    square_store(sums[0], SQUARE);
                    for (int i = 0; i < SQUARE; i += VL)
                        for (int j = 0; j < SQUARE; j += VL) {
                            vf v[VL];
                            for (int l = 0; l < VL; l++) v[l] = load(&sums[i + l][j]);
                            transpose(v);
                            for (int l = 0; l < VL; l++) store(&turned[j + l][i], v[l]);
                        }
                    for (i64 i = r; i < std::min(n, r + SQUARE); i++) finish(i, c, count, turned[i - r] + (c - from));
                }
        }
    });
}

// ---- float ----
template <class W> struct Float {
    static constexpr i64 many = 18;
    const float* x; const W* w; const float *scale, *bias; void* y; int dtype; i64 k, out;

    void finish(i64 r, i64 c, float s) const {
        if (scale) s *= scale[c];
        if (bias) s += bias[c];
        put(y, dtype, r * out + c, s);
    }
    template <int R, int C> SEPARATE void block(i64 r0, i64 c0) const {
        const float* xs = x + r0 * k;
        const W* ws = w + c0 * k;
        vw acc[R][C] = {};
        i64 i = 0;
        for (; i + WL <= k; i += WL) {
            fetch(ws + C * (k + i), C * WL * sizeof(W));
            vw wv[C];
            for (int c = 0; c < C; c++) wv[c] = load_wide(ws + c * k + i);
            for (int r = 0; r < R; r++) {
                vw xv = load_wide(xs + r * k + i);
                for (int c = 0; c < C; c++) acc[r][c] += xv * wv[c];
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) {
                float s = sum(acc[r][c]);
                for (i64 j = i; j < k; j++) s += xs[r * k + j] * wide(ws[c * k + j]);
                finish(r0 + r, c0 + c, s);
            }
    }
    void pack(i64 c0, i64 count, float* p) const {
        ::pack(k, count, p, [&](i64 c, i64 i) {
            const W* row = w + (c0 + c) * k;
            if (i + VL <= k) return load(row + i);
            vf v = {};
            for (i64 j = i; j < k; j++) v[j - i] = wide(row[j]);
            return v;
        });
    }
    void finish_row(i64 r, i64 c0, i64 count, const float* sums) const {
        i64 c = c0;
        for (i64 end = dtype == F32 ? c0 + count : 0; c + WL <= end; c += WL) {
            vw v = load_wide(sums + c - c0);
            if (scale) v *= load_wide(scale + c);
            if (bias) v += load_wide(bias + c);
            store((float*)y + r * out + c, v);
        }
        for (; c < c0 + count; c++) finish(r, c, sums[c - c0]);
    }
    template <int R> SEPARATE void panel(i64 r0, i64 c0, i64 count, const float* p) const {
        float sums[R][PANEL];
        multiply<R>(x + r0 * k, k, p, k, sums[0], PANEL);
        for (int r = 0; r < R; r++) finish_row(r0 + r, c0, count, sums[r]);
    }
};
template <class W> void float_linear(const void* x, int dtype, i64 n, i64 k, const void* w, const float* scale,
                                     const float* bias, i64 out, void* y, int threads) {
    Float<W> kernel{floats(x, dtype, n * k), (const W*)w, scale, bias, y, dtype, k, out};
    if (!std::is_same_v<W, float> && n >= (std::is_same_v<W, bf16> ? ENOUGH : kernel.many) && units_serve(n, 2 * k, out)) {
        const float* panels = row_panels(n, 2 * 2 * k, threads, [&](i64 r) {
            static thread_local std::vector<bf16> held;
            bf16* two = scratch(held, PANEL * 2 * k) + r % PANEL * 2 * k;
            in_two(kernel.x + r * k, k, two, two + k);
            return two;
        });
        auto weights = [=](i64 first, i64 end) -> const void* {
            const W* from = (const W*)w + first * k;
            if (std::is_same_v<W, bf16>) return from;
            static thread_local std::vector<bf16> held;                        // a code needs eight bits: nothing is lost
            bf16* some = scratch(held, (end - first) * k);
            for (i64 i = 0; i < (end - first) * k; i++) some[i] = {uint16_t(bits(wide(from[i])) >> 16)};
            return some;
        };
        return squares<false, 2>(weights, 2 * k, out, panels, n, threads, [&](i64 r, i64 c, i64 count, const float* sums) { kernel.finish_row(r, c, count, sums); });
    }
    product(kernel, n, out, k * sizeof(W), k, threads);
}

// ---- quantise ----
// Codes of one row (plus `shift`), and their scale; NaN where the row holds an infinity or a NaN.
template <class Code> SEPARATE float quantise(const float* x, i64 k, Code* codes, int shift) {
    uint32_t top = 0;
    for (i64 i = 0; i < k; i++) top = std::max(top, bits(x[i]) & 0x7fffffffu);
    if (top >= 0x7f800000u) { std::fill(codes, codes + k, Code(shift)); return NAN; }
    float amax = value(top), inv = std::min(1 / amax * 127, FLT_MAX);   // as PyTorch divides a number by a tensor
    for (i64 i = 0; i < k; i++) codes[i] = Code(int(std::rint(x[i] * inv)) + shift);
    return amax / 127;
}

// ---- int8 dots ----
#if defined VNNI
typedef uint8_t Code;            // 64 products an instruction, of unsigned with signed: so codes are shifted by 128 ...
constexpr int SHIFT = 128;
template <int R, int C> inline void dots(const Code* x, i64 stride, const int8_t* w, i64 k, int32_t (*sums)[C]) {
    __m512i acc[R][C] = {}, shifted[C] = {}, shift = _mm512_set1_epi8(char(SHIFT));
    for (i64 i = 0; i < k; i += 64) {
        fetch(w + C * (k + i), C * 64);
        __mmask64 mask = k - i >= 64 ? ~0ull : (1ull << (k - i)) - 1;
        __m512i wv[C];
        for (int c = 0; c < C; c++) {
            wv[c] = _mm512_maskz_loadu_epi8(mask, w + c * k + i);
            shifted[c] = _mm512_dpbusd_epi32(shifted[c], shift, wv[c]);   // ... and 128 times the weights' sum is taken off
        }
        for (int r = 0; r < R; r++) {
            __m512i xv = _mm512_loadu_si512(x + r * stride + i);
            for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], xv, wv[c]);
        }
    }
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) sums[r][c] = _mm512_reduce_add_epi32(_mm512_sub_epi32(acc[r][c], shifted[c]));
}
#elif defined __AVX2__
typedef int8_t Code;             // 32 products an instruction, of unsigned with signed: the weight's sign goes to the activation,
constexpr int SHIFT = 0;         // and two products, added in 16 bits, reach 2 * 127 * 127 at most: exact
inline int32_t sum(__m256i v) {
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_add_epi32(a, _mm_unpackhi_epi64(a, a));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 1)));
}
template <int R, int C> inline void dots(const Code* x, i64 stride, const int8_t* w, i64 k, int32_t (*sums)[C]) {
    __m256i acc[R][C] = {}, ones = _mm256_set1_epi16(1);
    i64 i = 0;
    for (; i + 32 <= k; i += 32) {
        fetch(w + C * (k + i), C * 32);
        __m256i wv[C], size[C];
        for (int c = 0; c < C; c++) size[c] = _mm256_abs_epi8(wv[c] = _mm256_loadu_si256((const __m256i*)(w + c * k + i)));
        for (int r = 0; r < R; r++) {
            __m256i xv = _mm256_loadu_si256((const __m256i*)(x + r * stride + i));
            for (int c = 0; c < C; c++)
                acc[r][c] = _mm256_add_epi32(acc[r][c], _mm256_madd_epi16(_mm256_maddubs_epi16(size[c], _mm256_sign_epi8(xv, wv[c])), ones));
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            sums[r][c] = sum(acc[r][c]);
            for (i64 j = i; j < k; j++) sums[r][c] += x[r * stride + j] * w[c * k + j];
        }
}
#else
typedef int8_t Code;             // plain loops, which compilers turn into the dot products of Arm
constexpr int SHIFT = 0;
template <int R, int C> inline void dots(const Code* x, i64 stride, const int8_t* w, i64 k, int32_t (*sums)[C]) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            int32_t s = 0;
            for (i64 i = 0; i < k; i++) s += int(x[r * stride + i]) * int(w[c * k + i]);
            sums[r][c] = s;
        }
}
#endif

// ---- int8 linear ----
struct Int8 {
    const Code* x; const float* a; const int8_t* w; const float *scale, *bias; void* y; int dtype; i64 k, stride, out;

    void finish(i64 r, i64 c, int32_t sum) const {
        float total = float(sum), s = a[r] * scale[c];
        put(y, dtype, r * out + c, bias ? float(double(total) * s + bias[c]) : total * s);
    }
    template <int R, int C> SEPARATE void block(i64 r0, i64 c0) const {
        int32_t sums[R][C];
        dots<R, C>(x + r0 * stride, stride, w + c0 * k, k, sums);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) finish(r0 + r, c0 + c, sums[r][c]);
    }
    void finish_row(i64 r, i64 c0, i64 count, const int32_t* sums) const {
        typedef int32_t vs __attribute__((vector_size(4 * WL)));
        i64 c = c0;
        for (i64 end = dtype == F32 && !bias ? c0 + count : 0; c + WL <= end; c += WL)
            store((float*)y + r * out + c, __builtin_convertvector(raw<vs>(sums + c - c0), vw) * (a[r] * load_wide(scale + c)));
        for (; c < c0 + count; c++) finish(r, c, sums[c - c0]);
    }
#ifdef __AVX2__
    static constexpr i64 many = 12;
    void pack(i64 c0, i64 count, float* p) const {       // a word: four inputs, whose products are added up first
        ::pack((k + 3) / 4, count, p, [&](i64 c, i64 i) {
            const int8_t* row = w + (c0 + c) * k;
            if (4 * (i + VL) <= k) return raw<vf>(row + 4 * i);
            int8_t v[4 * VL] = {};
            std::copy(row + 4 * i, row + k, v);
            return raw<vf>(v);
        });
    }
    template <int R> SEPARATE void panel(i64 r0, i64 c0, i64 count, const float* p) const {
        const Code* xs = x + r0 * stride;
        int32_t sums[R][PANEL];
#ifdef VNNI
        __m512i acc[R] = {}, shifted = {};
        for (i64 i = 0; i < k; i += 4) {
            __m512i wv = raw<__m512i>(p + i / 4 * PANEL);
            shifted = _mm512_dpbusd_epi32(shifted, _mm512_set1_epi8(char(SHIFT)), wv);
            for (int r = 0; r < R; r++) acc[r] = _mm512_dpbusd_epi32(acc[r], _mm512_set1_epi32(raw<int32_t>(xs + r * stride + i)), wv);
        }
        for (int r = 0; r < R; r++) { __m512i v = _mm512_sub_epi32(acc[r], shifted); memcpy(sums[r], &v, sizeof v); }
#else
        __m256i acc[R][2] = {}, ones = _mm256_set1_epi16(1);
        for (i64 i = 0; i < k; i += 4) {
            __m256i w0 = raw<__m256i>(p + i / 4 * PANEL), w1 = raw<__m256i>(p + i / 4 * PANEL + VL), size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
            for (int r = 0; r < R; r++) {
                __m256i xv = _mm256_set1_epi32(raw<int32_t>(xs + r * stride + i)), u = acc[r][0], v = acc[r][1];
                u = _mm256_add_epi32(u, _mm256_madd_epi16(_mm256_maddubs_epi16(size0, _mm256_sign_epi8(xv, w0)), ones));
                v = _mm256_add_epi32(v, _mm256_madd_epi16(_mm256_maddubs_epi16(size1, _mm256_sign_epi8(xv, w1)), ones));
                IN_TURN(u, v);
                acc[r][0] = u, acc[r][1] = v;
            }
        }
        memcpy(sums, acc, sizeof sums);
#endif
        for (int r = 0; r < R; r++) finish_row(r0 + r, c0, count, sums[r]);
    }
#else
    static constexpr i64 many = 0;
#endif
};
extern "C" void int8_linear(const void* x, int dtype, i64 n, i64 k, const int8_t* w, const float* scale, const float* bias,
                            i64 out, void* y, int threads) {
    static thread_local std::vector<Code> held_codes;
    static thread_local std::vector<float> held;
    i64 stride = (k + 63) / 64 * 64;
    Code* codes = scratch(held_codes, n * stride);
    float* a = scratch(held, n);
    const float* rows = floats(x, dtype, n * k);
    Int8 kernel{codes, a, w, scale, bias, y, dtype, k, stride, out};
    if (units_serve(n, k, out)) {
        const float* panels = row_panels(n, k, threads, [=](i64 r) { a[r] = quantise(rows + r * k, k, codes + r * k, 0); return codes + r * k; });
        auto weights = [=](i64 first, i64) { return w + first * k; };
        return squares<true, 1>(weights, k, out, panels, n, threads, [&](i64 r, i64 c, i64 count, const float* sums) { kernel.finish_row(r, c, count, (const int32_t*)sums); });
    }
    split(n, std::max<i64>(1, 16384 / std::max<i64>(k, 1)), threads, [=](i64 first, i64 last) {
        for (i64 r = first; r < last; r++) a[r] = quantise(rows + r * k, k, codes + r * stride, SHIFT);
    });
    product(kernel, n, out, k, (k + 3) / 4, threads);
}
extern "C" void float32_linear(const void* x, int dtype, i64 n, i64 k, const void* w, const float* scale, const float* bias,
                               i64 out, void* y, int threads) { float_linear<float>(x, dtype, n, k, w, scale, bias, out, y, threads); }
extern "C" void bfloat16_linear(const void* x, int dtype, i64 n, i64 k, const void* w, const float* scale, const float* bias,
                                i64 out, void* y, int threads) { float_linear<bf16>(x, dtype, n, k, w, scale, bias, out, y, threads); }
extern "C" void int8_weight_only_linear(const void* x, int dtype, i64 n, i64 k, const void* w, const float* scale, const float* bias,
                                        i64 out, void* y, int threads) { float_linear<int8_t>(x, dtype, n, k, w, scale, bias, out, y, threads); }

// ---- int4 ----
constexpr int GROUP = 32;        // inputs that share a scale and a zero point: 16 bytes of codes, low nibbles before high ones
#ifdef __AVX2__
typedef __m256i Bytes;
inline Bytes nibbles(const uint8_t* w) {
    __m128i v = _mm_loadu_si128((const __m128i*)w);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
}
inline Bytes codes32(const int8_t* x) { return _mm256_loadu_si256((const __m256i*)x); }
inline vf group_dot(Bytes w, Bytes x) {       // eight partial sums; 16-bit sums of two products reach 3810 at most: exact
#ifdef VNNI
    return (vf)_mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_setzero_si256(), w, x));
#else
    return (vf)_mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
#endif
}
#else
struct Bytes { int8_t v[GROUP]; };
inline Bytes nibbles(const uint8_t* w) {
    Bytes b;
    for (int j = 0; j < 16; j++) b.v[j] = w[j] & 15, b.v[j + 16] = w[j] >> 4;
    return b;
}
inline Bytes codes32(const int8_t* x) { return raw<Bytes>(x); }
inline vf group_dot(const Bytes& w, const Bytes& x) {
    int32_t s = 0;
    for (int j = 0; j < GROUP; j++) s += int(w.v[j]) * int(x.v[j]);
    return vf{float(s)};
}
#endif
inline vf halves(const f16* p, i64 n, i64 before) {       // the first n of eight, then zeros; `before` more lie in front of them
    f16 some[VL] = {};
#ifdef __F16C__
    if (n >= VL) return (vf)_mm256_cvtph_ps(raw<__m128i>(p));
    if (before >= VL - n) {                               // read the eight that end with them, and move them to the front
        static const int8_t move[2 * sizeof some] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
        return (vf)_mm256_cvtph_ps(_mm_shuffle_epi8(raw<__m128i>(p + n - VL), raw<__m128i>(move + 2 * (VL - n))));
    }
#endif
    std::copy(p, p + std::min<i64>(n, VL), some);
    vf v;
    for (int i = 0; i < VL; i++) v[i] = wide(some[i]);
    return v;
}
struct Int4 {   // x: codes [n, k]; a, sums: scale of each group of a row, and scale times the sum of its codes [n, stride]
    const int8_t* x; const float *a, *sums; const uint8_t* w; const f16 *scale, *zero; const float* bias; void* y; int dtype; i64 k, groups, stride, out;

    template <int R, int C> SEPARATE void block(i64 r0, i64 c0) const {
        vf acc[R][C] = {};
        for (i64 g = 0; g < groups; g += VL) {
            fetch(scale + (c0 + C) * groups + C * g, C * VL * sizeof(f16));
            fetch(zero + (c0 + C) * groups + C * g, C * VL * sizeof(f16));
            float s[R][C][VL];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                vf sc = halves(scale + (c0 + c) * groups + g, groups - g, g), zc = halves(zero + (c0 + c) * groups + g, groups - g, g);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    store(s[r][c], sc * load(a + (r0 + r) * stride + g));
                    acc[r][c] += zc * load(sums + (r0 + r) * stride + g);
                }
            }
            for (i64 j = 0; j < std::min<i64>(VL, groups - g); j++) {
                fetch(w + ((c0 + C) * groups + C * (g + j)) * (GROUP / 2), C * (GROUP / 2));
                Bytes wv[C];
                for (int c = 0; c < C; c++) wv[c] = nibbles(w + ((c0 + c) * groups + g + j) * (GROUP / 2));
                for (int r = 0; r < R; r++) {
                    Bytes xv = codes32(x + (r0 + r) * k + (g + j) * GROUP);
                    for (int c = 0; c < C; c++) acc[r][c] += s[r][c][j] * group_dot(wv[c], xv);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) put(y, dtype, (r0 + r) * out + c0 + c, sum(acc[r][c]) + (bias ? bias[c0 + c] : 0));
    }
#ifdef __AVX2__
    static constexpr i64 many = 8;
    void pack(i64 c0, i64 count, float* p) const {       // words of four codes; behind them the scales and zero points of all groups
        ::pack(k / 4, count, p, [&](i64 c, i64 i) { return (vf)nibbles(w + (c0 + c) * k / 2 + 2 * i); });
        auto of = [&](const f16* from) { return [=](i64 c, i64 g) { return halves(from + (c0 + c) * groups + g, groups - g, g); }; };
        ::pack(stride, count, p + k / 4 * PANEL, of(scale));
        ::pack(stride, count, p + (k / 4 + stride) * PANEL, of(zero));
    }
    template <int R> SEPARATE void panel(i64 r0, i64 c0, i64 count, const float* p) const {
        const float *sc = p + k / 4 * PANEL, *zc = sc + stride * PANEL;
        vw acc[R][PANEL / WL] = {};
        for (i64 g = 0; g < groups; g++) {
            const float* words = p + g * (GROUP / 4) * PANEL;
            const int8_t* xs = x + r0 * k + g * GROUP;
#ifdef VNNI
            __m512i part[R] = {};
            for (i64 i = 0; i < GROUP / 4; i++) {
                __m512i wv = raw<__m512i>(words + i * PANEL);
                for (int r = 0; r < R; r++) part[r] = _mm512_dpbusd_epi32(part[r], wv, _mm512_set1_epi32(raw<int32_t>(xs + r * k + 4 * i)));
            }
            auto total = [&](int r, int) { return (vw)_mm512_cvtepi32_ps(part[r]); };
#else
            __m256i part[R][2] = {}, ones = _mm256_set1_epi16(1);    // sixteen products in each 16-bit sum: 30480 at most
            for (i64 i = 0; i < GROUP / 4; i++) {
                __m256i w0 = raw<__m256i>(words + i * PANEL), w1 = raw<__m256i>(words + i * PANEL + VL);
                for (int r = 0; r < R; r++) {
                    __m256i xv = _mm256_set1_epi32(raw<int32_t>(xs + r * k + 4 * i)), u = part[r][0], v = part[r][1];
                    u = _mm256_add_epi16(u, _mm256_maddubs_epi16(w0, xv));
                    v = _mm256_add_epi16(v, _mm256_maddubs_epi16(w1, xv));
                    IN_TURN(u, v);
                    part[r][0] = u, part[r][1] = v;
                }
            }
            auto total = [&](int r, int half) { return (vf)_mm256_cvtepi32_ps(_mm256_madd_epi16(part[r][half], ones)); };
#endif
            for (int c = 0; c < PANEL / WL; c++) {
                vw scales = load_wide(sc + g * PANEL + c * WL), zeros = load_wide(zc + g * PANEL + c * WL);
                for (int r = 0; r < R; r++) {
                    i64 at = (r0 + r) * stride + g;
                    acc[r][c] += total(r, c) * (a[at] * scales) + sums[at] * zeros;
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (i64 c = 0; c < count; c++) put(y, dtype, (r0 + r) * out + c0 + c, acc[r][c / WL][c % WL] + (bias ? bias[c0 + c] : 0));
    }
#else
    static constexpr i64 many = 0;
#endif
};
extern "C" void int4_linear(const void* x, int dtype, i64 n, i64 k, const uint8_t* w, const f16* scale, const f16* zero,
                            const float* bias, i64 out, void* y, int threads) {
    static thread_local std::vector<int8_t> held_codes;
    static thread_local std::vector<float> held;
    i64 groups = k / GROUP, stride = (groups + VL - 1) / VL * VL;
    int8_t* codes = scratch(held_codes, n * k);
    float *a = scratch(held, 2 * n * stride), *sums = a + n * stride;
    const float* rows = floats(x, dtype, n * k);
    split(n, std::max<i64>(1, 16384 / std::max<i64>(k, 1)), threads, [=](i64 first, i64 last) {
        for (i64 r = first; r < last; r++)
            for (i64 g = 0; g < stride; g++) {
                i64 i = r * stride + g;
                int total = 0;
                int8_t* q = codes + r * k + g * GROUP;
                a[i] = g < groups ? quantise(rows + r * k + g * GROUP, GROUP, q, 0) : 0;
                if (g < groups) for (int j = 0; j < GROUP; j++) total += q[j];
                sums[i] = a[i] * total;
            }
    });
    product(Int4{codes, a, sums, w, scale, zero, bias, y, dtype, k, groups, stride, out}, n, out, k / 2, k / 4 + 2 * stride, threads);
}

// ---- softmax ----
constexpr float HIDDEN = -1e30f;   // the score of a key that may not be seen
template <class V> inline V exponential(V x) {      // of x <= 0, to the last bit or two; 0 below -87
    typedef decltype(x < x) Vi;
    V shifted = x * 1.44269504f + 12582912.f, n = shifted - 12582912.f;       // 1.5 * 2^23: the sum's last bits are the rounded integer
    V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = 1.f + r * (1.f + r * (.5f + r * (1.6666667e-1f + r * (4.1666668e-2f + r * (8.3333340e-3f + r * 1.3888889e-3f)))));
    V e = (V)((Vi)p + ((Vi)shifted << 23));
    return x < -87.f ? V{} : e;
}
// Turn n scores (room up to a multiple of sixteen) into their exponentials; returns the largest score, adds up in `total`.
inline float softmax(float* s, i64 n, float& total) {
    for (i64 j = n; j % WL || !j; j++) s[j] = HIDDEN;
    vw top = load_wide(s), l = {};
    for (i64 j = WL; j < n; j += WL) { vw v = load_wide(s + j); top = v > top ? v : top; }
    float m = top[0];
    for (int i = 1; i < WL; i++) m = std::max(m, top[i]);
    for (i64 j = 0; j < n; j += WL) { vw e = exponential(load_wide(s + j) - m); store(s + j, e); l += e; }
    for (i64 j = n; j % WL; j++) s[j] = 0;
    total = sum(l);
    return m;
}

// ---- attention ----
constexpr int AHEAD = 8;           // keys: the memory is asked for them so long before they are needed
constexpr int CHUNK = 256;         // keys of one task: fixed, so that a result does not depend on threads or neighbours
constexpr int QUERIES = 32;        // of one task, at most
struct Chunk {                     // the keys of a task: positions, rows of the pool, and (int8) scale and offset of key and value
    i64 n;
    int32_t pos[CHUNK];
    i64 row[CHUNK];
    float scale[2][CHUNK], offset[2][CHUNK];
    const float *keys = nullptr, *values = nullptr;   // panels of them: [n / PANEL, d, PANEL] and [d / PANEL, CHUNK, PANEL]; or none
    bool units = false;                               // or of words of two bfloat16: [n / PANEL, d / 2, PANEL] and [d / PANEL, CHUNK / 2, PANEL]
};

template <class T> struct Attention {
    const void* q; i64 q_stride; int dtype; void* out;        // q: numbers from row to row; out: [N, heads, d]
    const T *keys, *values; const f16* params; i64 num_params;  // [slots, kv_heads, d]; [slots, kv_heads, 2, num_params]
    const int32_t *tables, *lens, *queries, *starts;          // [B, width]; [B] length, queries, first row
    i64 width, block_size, heads, kv_heads, d, window, sinks;
    float scale;

    i64 first(i64 b) const { return std::max<i64>(0, lens[b] - queries[b] + 1 - window); }   // of the first query's window
    i64 visible(i64 b) const { return queries[b] ? lens[b] - first(b) + std::min(sinks, first(b)) : 0; }

    // The keys number c * CHUNK and following, of those that request b may see: walk its table, a block at a time.
    void find(i64 b, i64 c, i64 h, Chunk& chunk) const {
        i64 begin = first(b), sink = std::min(sinks, begin), n = std::min<i64>(CHUNK, visible(b) - c * CHUNK);
        chunk.n = 0;
        for (i64 i = c * CHUNK, end = i + n; i < end;) {
            i64 pos = i < sink ? i : i - sink + begin, block = tables[b * width + pos / block_size];
            i64 run = std::min(std::min(end, i < sink ? sink : end) - i, block_size - pos % block_size);
            if (block >= 0)
                for (i64 j = 0, slot = block * block_size + pos % block_size; j < run; j++) {
                    chunk.pos[chunk.n] = pos + j;
                    chunk.row[chunk.n++] = (slot + j) * kv_heads + h;
                }
            i += run;
        }
        if (!num_params) return;
        for (i64 j = 0; j < chunk.n || j % VL; j++)
            for (int which = 0; which < 2; which++) {
                const f16* p = params + (chunk.row[j] * 2 + which) * num_params;
                chunk.scale[which][j] = j < chunk.n ? wide(p[0]) : 0;
                chunk.offset[which][j] = j < chunk.n && num_params == 2 ? wide(p[1]) : 0;
            }
    }

    // The scores of n keys become their weights, for a query that sees up to position `limit`.
    void weigh(float* s, i64 n, const Chunk& chunk, i64 limit, float* out) const {
        for (i64 j = n; j && chunk.pos[j - 1] > limit; j--) s[j - 1] = HIDDEN;
        for (i64 j = 0; j < n && chunk.pos[j] <= limit - window; j++) if (chunk.pos[j] >= sinks) s[j] = HIDDEN;
        out[d] = softmax(s, n, out[d + 1]);
    }
    // As `block`, `count` rows by matrix units: queries and weights as two bfloat16 each.
    SEPARATE void square(i64 b, i64 h, i64 row, i64 count, const Chunk& chunk, float* part) const {
        i64 group = heads / kv_heads, n = chunk.n, limit[SQUARE];
        alignas(64) bf16 two[2][SQUARE][CHUNK + SQUARE];              // queries, and then weights; rows of 512 bytes would share places in the cache
        alignas(64) float s[SQUARE][CHUNK + PANEL];
        float query[512];
        for (int r = 0; r < SQUARE; r++) {
            i64 t = (row + r) / group, head = h * group + (row + r) % group;
            limit[r] = lens[b] - queries[b] + t;
            if (r >= count) { std::fill(two[0][r], two[0][r] + d, bf16{0}), std::fill(two[1][r], two[1][r] + d, bf16{0}); continue; }
            widen(q, dtype, (starts[b] + t) * q_stride + head * d, d, query);
            for (i64 i = 0; i < d; i++) query[i] *= scale;
            in_two(query, d, two[0][r], two[1][r]);
        }
        while (n && chunk.pos[n - 1] > limit[count - 1]) n--;
        for (i64 j = 0; j < n; j += SQUARE) {
            square_product<false, 2>(two, sizeof two[0][0], sizeof two[0], chunk.keys + j / PANEL * (d / 2) * PANEL, d / 2 * PANEL, 0, 2 * d);
            square_store(s[0] + j, CHUNK + PANEL);
        }
        i64 end = (n + SQUARE - 1) / SQUARE * SQUARE;
        for (int r = 0; r < SQUARE; r++) {
            if (r < count) weigh(s[r], n, chunk, limit[r], part + r * (d + 2));
            std::fill(s[r] + (r < count ? n : 0), s[r] + end, 0.f);
            in_two(s[r], end, two[0][r], two[1][r]);
        }
        for (i64 i = 0; i < d; i += SQUARE) {
            square_product<false, 2>(two, sizeof two[0][0], sizeof two[0], chunk.values + i / PANEL * (CHUNK / 2) * PANEL, CHUNK / 2 * PANEL, 0, 2 * end);
            square_store(s[0], CHUNK + PANEL);
            for (i64 r = 0; r < count; r++) std::copy(s[r], s[r] + SQUARE, part + r * (d + 2) + i);
        }
    }
    // R query rows, first of them `row` of request b's queries that share key-value head h, against the keys of a chunk:
    // unnormalised output [d], largest score, and sum of exponentials of each, into `part` [R, d + 2].
    template <int R> SEPARATE void block(i64 b, i64 h, i64 row, const Chunk& chunk, float* part, bool ask) const {
        i64 group = heads / kv_heads, n = chunk.n;
        float query[R][512], query_sum[R], s[R][CHUNK + PANEL], extra[R], *out[R];
        i64 limit[R];
        for (int r = 0; r < R; r++) {
            i64 t = (row + r) / group, head = h * group + (row + r) % group;
            widen(q, dtype, (starts[b] + t) * q_stride + head * d, d, query[r]);
            limit[r] = lens[b] - queries[b] + t;
            out[r] = part + r * (d + 2);
            vf total = {};
            for (i64 i = 0; i < d; i += VL) { vf v = load(query[r] + i) * scale; store(query[r] + i, v); total += v; }
            query_sum[r] = sum(total);
        }
        while (n && chunk.pos[n - 1] > limit[R - 1]) n--;             // what none of them may see
        for (i64 j = 0; chunk.keys && j < n; j += PANEL) {
            multiply<R>(query[0], 512, chunk.keys + j * d, d, s[0] + j, CHUNK + PANEL);
        }
        for (i64 j = 0; !chunk.keys && j < n; j += 2) {
            const T *one = keys + chunk.row[j] * d, *two = keys + chunk.row[std::min(j + 1, n - 1)] * d;
            for (i64 i = j; ask && i < std::min(j + 2, n); i++) {
                fetch(keys + chunk.row[std::min(i + AHEAD, n - 1)] * d, d * sizeof(T));
                fetch(values + chunk.row[i] * d, d * sizeof(T));
            }
            vf acc[R][2] = {};
            for (i64 i = 0; i < d; i += VL) {
                vf k1 = load(one + i), k2 = load(two + i);
                for (int r = 0; r < R; r++) { vf qv = load(query[r] + i); acc[r][0] += qv * k1; acc[r][1] += qv * k2; }
            }
            for (int r = 0; r < R; r++) { s[r][j] = sum(acc[r][0]); s[r][j + 1] = sum(acc[r][1]); }
        }
        for (int r = 0; r < R; r++) {
            if (num_params)
                for (i64 j = 0; j < n; j++) s[r][j] = s[r][j] * chunk.scale[0][j] + query_sum[r] * chunk.offset[0][j];
            weigh(s[r], n, chunk, limit[r], out[r]);
            vf offsets = {};
            if (num_params)
                for (i64 j = 0; j < n; j += VL) {
                    vf p = load(s[r] + j);
                    offsets += p * load(chunk.offset[1] + j);
                    store(s[r] + j, p * load(chunk.scale[1] + j));
                }
            extra[r] = sum(offsets);
        }
        i64 i = 0;
        for (; chunk.values && i < d; i += PANEL) {
            float sums[R][PANEL];
            multiply<R>(s[0], CHUNK + PANEL, chunk.values + i * CHUNK, n, sums[0], PANEL);
            for (int r = 0; r < R; r++)
                for (i64 at = i; at < std::min(d, i + PANEL); at += VL) store(out[r] + at, load(sums[r] + at - i) + extra[r]);
        }
        for (; i + 2 * VL <= d; i += 2 * VL) add_values<R, 2>(chunk, n, s, i, extra, out);
        for (; i < d; i += VL) add_values<R, 1>(chunk, n, s, i, extra, out);
    }
    template <int R, int C> void add_values(const Chunk& chunk, i64 n, const float (*s)[CHUNK + PANEL], i64 i, const float* extra, float** out) const {
        vf acc[R][C] = {};
        for (i64 j = 0; j < n; j++)
            for (int c = 0; c < C; c++) {
                vf v = load(values + chunk.row[j] * d + i + c * VL);
                for (int r = 0; r < R; r++) acc[r][c] += s[r][j] * v;
            }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store(out[r] + i + c * VL, acc[r][c] + extra[r]);
    }
    void side_by_side(Chunk& chunk) const {
        static thread_local std::vector<float> held;
        float *k = scratch(held, 2 * CHUNK * (d + VL)), *v = k + CHUNK * d;
        auto ask = [&](const T* from, i64 j) { for (i64 i = j + PANEL; i < std::min(j + 2 * PANEL, chunk.n); i++) fetch(from + chunk.row[i] * d, d * sizeof(T)); };
        chunk.keys = k, chunk.values = v, chunk.units = std::is_same_v<T, bf16> && has_units && d % SQUARE == 0 && d <= CHUNK;
        if (chunk.units) {
            for (i64 j = 0; j < chunk.n; j += PANEL)
                ask(keys, j), pack(d / 2, std::min<i64>(PANEL, chunk.n - j), k + j / 2 * d, [&](i64 key, i64 i) { return raw<vf>(keys + chunk.row[j + key] * d + 2 * i); });
            i64 end = (chunk.n + SQUARE - 1) / SQUARE * SQUARE;
            for (i64 j = 0; j < end; j += 2) {
                if (j % PANEL == 0) ask(values, j);
                for (i64 i = 0; i < d; i += VL) {
                    auto of = [&](i64 at) { return at < chunk.n ? __builtin_convertvector(raw<vh>(values + chunk.row[at] * d + i), vi) : vi{}; };
                    store(v + i / PANEL * PANEL * (CHUNK / 2) + j / 2 * PANEL + i % PANEL, (vf)(of(j) | of(j + 1) << 16));
                }
            }
            return;
        }
        for (i64 j = 0; j < chunk.n; j += PANEL)
            pack(d, std::min<i64>(PANEL, chunk.n - j), k + j * d, [&](i64 key, i64 i) { return load(keys + chunk.row[j + key] * d + i); });
        for (i64 j = 0; j < chunk.n; j++)
            for (i64 i = 0; i < d; i += VL) store(v + i / PANEL * PANEL * CHUNK + j * PANEL + i % PANEL, load(values + chunk.row[j] * d + i));
    }
    // Of the query rows that share key-value head h of request b (its queries, each with its heads), from ... to-1, against chunk c.
    void task(i64 b, i64 c, i64 h, i64 from, i64 to, float* part) const {
        Chunk chunk;
        find(b, c, h, chunk);
        i64 group = heads / kv_heads, before = lens[b] - queries[b], lowest = before + from / group, highest = before + (to - 1) / group;
        while (chunk.n && chunk.pos[chunk.n - 1] > highest) chunk.n--;                                        // what none of them may see
        if (chunk.n && chunk.pos[chunk.n - 1] <= lowest - window && chunk.pos[0] >= sinks) chunk.n = 0;
        if (to - from >= 12) side_by_side(chunk);                                                             // from there on it pays
        for (i64 row = from; row < to;) {
            i64 left = to - row;
            bool ask = row == from;
            float* place = part + (row - from) * (d + 2);
            if (chunk.units) square(b, h, row, std::min(left, SQUARE), chunk, place), row += SQUARE;
            else if (HIGH > 6 && left >= HIGH && chunk.keys) block<HIGH>(b, h, row, chunk, place, ask), row += HIGH;
            else if (left >= 6) block<6>(b, h, row, chunk, place, ask), row += 6;
            else if (left >= 4) block<4>(b, h, row, chunk, place, ask), row += 4;
            else if (left == 3) block<3>(b, h, row, chunk, place, ask), row += 3;
            else if (left == 2) block<2>(b, h, row, chunk, place, ask), row += 2;
            else block<1>(b, h, row, chunk, place, ask), row += 1;
        }
    }
    // Put the chunks of one query head together.
    void merge(i64 row, i64 chunks, const float* part, i64 chunk_stride) const {
        float m = HIDDEN, total = 0;
        for (i64 c = 0; c < chunks; c++) m = std::max(m, part[c * chunk_stride + d]);
        float o[512] = {};
        for (i64 c = 0; c < chunks; c++) {
            const float* p = part + c * chunk_stride;
            float weight = std::exp(p[d] - m);
            total += weight * p[d + 1];
            for (i64 i = 0; i < d; i++) o[i] += weight * p[i];
        }
        for (i64 i = 0; i < d; i++) put(out, dtype, row * d + i, o[i] / total);
    }
    // Query rows from ... to-1 of request b that share head h, whose partial results of each chunk are `stride` numbers apart.
    void finish(i64 b, i64 h, i64 from, i64 to, i64 chunks, const float* part, i64 stride) const {
        for (i64 group = heads / kv_heads, row = from; row < to; row++)
            merge((starts[b] + row / group) * heads + h * group + row % group, chunks, part + (row - from) * (d + 2), stride);
    }
    // With few queries, each chunk of keys is a task, and what they find waits in [chunks, kv_heads, rows, d + 2] until all are done.
    // With many queries, there are tasks enough without: each does all chunks for some of them.
    void run(i64 requests, int threads) const {
        static thread_local std::vector<float> held;
        i64 group = heads / kv_heads;
        std::vector<i64> chunks(requests), tasks(requests + 1), parts(requests + 1);      // tasks, partial results: before request b
        for (i64 b = 0; b < requests; b++) {
            bool few = queries[b] <= QUERIES;
            chunks[b] = (visible(b) + CHUNK - 1) / CHUNK;
            tasks[b + 1] = tasks[b] + kv_heads * (few ? chunks[b] : (queries[b] + QUERIES - 1) / QUERIES);
            parts[b + 1] = parts[b] + (few ? chunks[b] * queries[b] * heads : 0);
        }
        float* part = scratch(held, parts[requests] * (d + 2));
        i64 total = tasks[requests];
        split(total, 1, threads, [&](i64 first, i64 last) {
            static thread_local std::vector<float> own;
            Units units;
            for (i64 j = first; j < last; j++) {
                i64 i = j % 2 ? total - 1 - j / 2 : j / 2;             // later queries see more keys: so take one from each end in turn
                i64 b = std::upper_bound(tasks.begin(), tasks.end(), i) - tasks.begin() - 1, rows = queries[b] * group;
                i64 h = (i - tasks[b]) % kv_heads, rest = (i - tasks[b]) / kv_heads;
                if (queries[b] <= QUERIES) task(b, rest, h, 0, rows, part + (parts[b] + (rest * kv_heads + h) * rows) * (d + 2));
                else {
                    i64 from = rest * QUERIES * group, to = std::min(rows, from + QUERIES * group), stride = (to - from) * (d + 2);
                    float* mine = scratch(own, chunks[b] * stride);
                    for (i64 c = 0; c < chunks[b]; c++) task(b, c, h, from, to, mine + c * stride);
                    finish(b, h, from, to, chunks[b], mine, stride);
                }
            }
        });
        split(requests, 8, threads, [&](i64 first, i64 last) {
            for (i64 b = first; b < last; b++)
                if (i64 rows = queries[b] * group; queries[b] <= QUERIES)
                    for (i64 h = 0; h < kv_heads; h++) finish(b, h, 0, rows, chunks[b], part + (parts[b] + h * rows) * (d + 2), kv_heads * rows * (d + 2));
        });
    }
};
// sizes: width, block_size, heads, kv_heads, d, window, sinks, number of parameters, requests, and numbers from row to row of q
extern "C" void paged_attention(const void* q, int dtype, void* out, const void* keys, const void* values, int kv_dtype,
                                const f16* params, const int32_t* tables, const int32_t* lens, const int32_t* queries,
                                const int32_t* starts, const i64* sizes, float scale, int threads) {
    auto go = [&](auto element) {
        typedef decltype(element) T;
        Attention<T>{q, sizes[9], dtype, out, (const T*)keys, (const T*)values, params, sizes[7], tables, lens, queries, starts,
                     sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], scale}.run(sizes[8], threads);
    };
    if (kv_dtype == 2) go(int8_t{}); else if (kv_dtype == BF16) go(bf16{}); else go(float{});
}

// ---- pointwise ----
// x += add (where there is one), in place; y = x / rms(x) * weight, row by row.
extern "C" void rms_norm(float* x, const float* add, const float* weight, float eps, i64 n, i64 d, float* y, int threads) {
    split(n, std::max<i64>(1, 16384 / d), threads, [=](i64 first, i64 last) {
        for (i64 r = first; r < last; r++) {
            float *row = x + r * d, *out = y + r * d, total = 0;
            if (add) for (i64 i = 0; i < d; i++) row[i] += add[r * d + i];
            vw squares = {};
            i64 i = 0;
            for (; i + WL <= d; i += WL) { vw v = load_wide(row + i); squares += v * v; }
            for (; i < d; i++) total += row[i] * row[i];
            float factor = 1 / std::sqrt((total + sum(squares)) / d + eps);
            for (i64 j = 0; j < d; j++) out[j] = row[j] * factor * weight[j];
        }
    });
}
template <class V> inline V silu(V x) {             // x / (1 + exp(-x)), by the exponential of -|x|
    V e = exponential(x < 0.f ? x : -x);
    return (x < 0.f ? x * e : x) / (1.f + e);
}
// y [n, d] = silu(first half of a row of x [n, 2 * d]) * second half
extern "C" void silu_mul(const float* x, i64 n, i64 d, float* y, int threads) {
    split(n, std::max<i64>(1, 16384 / d), threads, [=](i64 first, i64 last) {
        for (i64 r = first; r < last; r++) {
            const float *gate = x + 2 * r * d, *up = gate + d;
            i64 i = 0;
            for (; i + WL <= d; i += WL) store(y + r * d + i, silu(load_wide(gate + i)) * load_wide(up + i));
            for (; i < d; i++) y[r * d + i] = silu(vf{gate[i]})[0] * up[i];
        }
    });
}
// Turn the first `turned` of the heads of x [n, heads, d], in place: x * cos + (halves swapped) * sin, sin with its sign [n, d].
extern "C" void rope(float* x, const float* cos, const float* sin, i64 n, i64 heads, i64 turned, i64 d, int threads) {
    split(n, std::max<i64>(1, 16384 / (heads * d)), threads, [=](i64 first, i64 last) {
        for (i64 r = first; r < last; r++)
            for (i64 h = 0; h < turned; h++) {
                float *a = x + (r * heads + h) * d, *b = a + d / 2;
                const float *c = cos + r * d, *s = sin + r * d;
                for (i64 i = 0, half = d / 2; i < half; i++) {
                    float low = a[i], high = b[i];
                    a[i] = low * c[i] + high * s[i];
                    b[i] = high * c[i + half] + low * s[i + half];
                }
            }
    });
}

// ---- cache write ----
// One vector as microgen.quantization.quantize_kv has it: float16 scale (and offset), int8 codes; scale NaN where it holds an infinity or a NaN.
inline void quantise_kv(const float* x, i64 d, int8_t* codes, f16* params, i64 num_params) {
    constexpr float most = 65504;
    float low = x[0], high = x[0], odd = 0, offset = 0;
    for (i64 i = 0; i < d; i++) { low = std::min(low, x[i]); high = std::max(high, x[i]); odd += x[i] * 0; }
    if (num_params == 2) offset = wide(params[1] = half(std::min(std::max(low / 2 + high / 2, -most), most)));
    float reach = num_params == 2 ? std::max(high - offset, offset - low) : std::max(high, -low);
    float scale = wide(params[0] = half(std::min(reach / 127, most) + odd)), inv = scale > 0 ? 1 / scale : 0;
    for (i64 i = 0; i < d; i++) codes[i] = odd != odd ? 0 : int8_t(std::min(std::max(std::rint((x[i] - offset) * inv), -127.f), 127.f));
}
// Keys and values x [n, 2, kv_heads, d], `stride` numbers from row to row, into slots of the pool.
extern "C" void write_kv(const float* x, i64 n, i64 stride, i64 kv_heads, i64 d, const i64* slots, void* keys, void* values, int kv_dtype,
                         f16* params, i64 num_params, int threads) {
    split(n, std::max<i64>(1, 16384 / (2 * kv_heads * d)), threads, [=](i64 first, i64 last) {
        for (i64 r = first; r < last; r++)
            for (i64 which = 0; which < 2; which++)
                for (i64 h = 0; h < kv_heads; h++) {
                    const float* from = x + r * stride + (which * kv_heads + h) * d;
                    void* to = which ? values : keys;
                    i64 row = slots[r] * kv_heads + h;
                    if (kv_dtype == 2) quantise_kv(from, d, (int8_t*)to + row * d, params + (row * 2 + which) * num_params, num_params);
                    else for (i64 i = 0; i < d; i++) put(to, kv_dtype, row * d + i, from[i]);
                }
    });
}

// ---- all layers ----
enum Format { FLOAT32, BFLOAT16, INT8, INT8_WEIGHT_ONLY, INT4 };
struct Matrix {
    i64 format, in, out; const void *w, *scale, *zero; const float* bias;

    void times(const float* x, i64 n, float* y, int threads) const {
        auto go = [&](auto linear) { linear(x, F32, n, in, w, (const float*)scale, bias, out, y, threads); };
        switch (format) {
        case FLOAT32: return go(float32_linear);
        case BFLOAT16: return go(bfloat16_linear);
        case INT8: return int8_linear(x, F32, n, in, (const int8_t*)w, (const float*)scale, bias, out, y, threads);
        case INT8_WEIGHT_ONLY: return go(int8_weight_only_linear);
        case INT4: return int4_linear(x, F32, n, in, (const uint8_t*)w, (const f16*)scale, (const f16*)zero, bias, out, y, threads);
        }
    }
};
struct Layer { const float *input_norm, *post_norm, *q_norm, *k_norm; Matrix qkv, o, up, down; void *keys, *values; f16* params; i64 window; };

// sizes: those of attention, then layers, rows, hidden, inner. x [rows, hidden] changes; add [rows, hidden] is what is to be added to it next.
// seconds: of each kind of part, in the order in which they first come.
extern "C" void decoder_layers(const Layer* layers, float* x, float* add, const float* cos, const float* sin, const i64* slots, int kv_dtype,
                               const int32_t* tables, const int32_t* lens, const int32_t* queries, const int32_t* starts, const i64* sizes,
                               float eps, float scale, double* seconds, int threads) {
    static thread_local std::vector<float> held;
    i64 heads = sizes[2], kv = sizes[3], d = sizes[4], count = sizes[10], n = sizes[11], hidden = sizes[12], inner = sizes[13], row = (heads + 2 * kv) * d;
    float *h = scratch(held, n * (hidden + row + heads * d + 3 * inner)), *qkv = h + n * hidden, *out = qkv + n * row, *wide = out + n * heads * d, *narrow = wide + 2 * n * inner;
    i64 own[10];
    std::copy(sizes, sizes + 10, own);
    auto before = std::chrono::steady_clock::now();
    auto took = [&](int part) {
        auto now = std::chrono::steady_clock::now();
        seconds[part] += std::chrono::duration<double>(now - before).count();
        before = now;
    };
    together(threads, [&] { for (const Layer* l = layers; l < layers + count; l++) {
        rms_norm(x, l == layers ? nullptr : add, l->input_norm, eps, n, hidden, h, threads); took(0);
        l->qkv.times(h, n, qkv, threads); took(1);
        if (l->q_norm) {
            for (float* r = qkv; r < qkv + n * row; r += row) {
                rms_norm(r, nullptr, l->q_norm, eps, heads, d, r, threads);
                rms_norm(r + heads * d, nullptr, l->k_norm, eps, kv, d, r + heads * d, threads);
            }
            took(0);
        }
        rope(qkv, cos, sin, n, heads + 2 * kv, heads + kv, d, threads); took(2);
        write_kv(qkv + heads * d, n, row, kv, d, slots, l->keys, l->values, kv_dtype, l->params, sizes[7], threads); took(3);
        own[5] = l->window;
        paged_attention(qkv, F32, out, l->keys, l->values, kv_dtype, l->params, tables, lens, queries, starts, own, scale, threads); took(4);
        l->o.times(out, n, add, threads); took(5);
        rms_norm(x, add, l->post_norm, eps, n, hidden, h, threads); took(0);
        l->up.times(h, n, wide, threads); took(6);
        silu_mul(wide, n, inner, narrow, threads); took(7);
        l->down.times(narrow, n, add, threads); took(8);
    } });
}

// ---- about ----
extern "C" const char* about() {
#if defined AMX
    return "AVX-512 VNNI, AMX"
#elif defined VNNI
    return "AVX-512 VNNI"
#elif defined __AVX2__
    return "AVX2"
#else
    return "portable"
#endif
#ifdef _OPENMP
        ", OpenMP";
#else
        ", one thread";
#endif
}
