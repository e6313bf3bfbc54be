/* What translated PTX is made of (translate.py), beside the emulation's barriers, shuffles and atomics. Each follows the PTX
 * ISA manual's description of an instruction; test_ptx.py compares them with rules written once more, in Python. */
#ifndef SID_PTX_H
#define SID_PTX_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>

#include "bits.h"
#include "order.h"

namespace {

[[noreturn]] void ptx_refused(const char *what) { emulate::stop("not translated: %s", what); }

/* ---- words and floats */

inline float f32_of(uint32_t x) { return sid_bits_f32(x); }
inline double f64_of(uint64_t x) {
    double d;
    memcpy(&d, &x, sizeof d);
    return d;
}
inline uint32_t bits_of(float x) { return sid_f32_bits(x); }
inline uint64_t bits_of(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
template <typename T> bool is_signed() { return (T)-1 < 0; }
template <typename T> constexpr uint32_t width() { return 8 * sizeof(T); }

/* Single precision has one NaN, whatever the operands' bits are; double precision keeps those of an operand. */
inline float ptx_nan(float x) { return x != x ? sid_bits_f32(0x7fffffffu) : x; }
inline double ptx_nan(double x) { return x; }
template <typename T> bool ptx_unordered(T a, T b) { return a != a || b != b; }

inline uint16_t ptx_f16(float x) { return x != x ? (uint16_t)0x7fffu : sid_f32_to_f16(x); }
inline uint16_t ptx_bf16(float x) { return x != x ? (uint16_t)0x7fffu : sid_f32_to_bf16(x); }
inline float ptx_of_f16(uint32_t h) { return sid_f16_to_f32((uint16_t)h); }
inline float ptx_of_bf16(uint32_t h) { return sid_bf16_to_f32((uint16_t)h); }

/* A whole number to an integer: the nearest one that there is. A NaN gives 0, or, where a side has 64 bits, the top bit. */
template <typename T, typename F> T ptx_integer(F x, bool top) {
    const T highest = is_signed<T>() ? (T)(((uint64_t)1 << (width<T>() - 1)) - 1) : (T) ~(T)0;
    const T lowest = is_signed<T>() ? (T)((uint64_t)1 << (width<T>() - 1)) : (T)0;
    if (x != x) return top ? (T)((uint64_t)1 << (width<T>() - 1)) : (T)0;
    if ((double)x >= std::ldexp(1.0, (int)width<T>() - (is_signed<T>() ? 1 : 0))) return highest;
    if ((double)x <= (is_signed<T>() ? -std::ldexp(1.0, (int)width<T>() - 1) : 0.0)) return lowest;
    return (T)x;
}
template <typename T, typename F> T ptx_saturated(F of) {
    const __int128 x = of, one = 1;
    const __int128 highest = (one << (width<T>() - (is_signed<T>() ? 1 : 0))) - 1;
    const __int128 lowest = is_signed<T>() ? -(one << (width<T>() - 1)) : 0;
    return (T)(x > highest ? highest : x < lowest ? lowest : x);
}

/* ---- arithmetic */

template <typename T> T ptx_div(T a, T b) {
    if (!b) return (T) ~(T)0;                                               /* the manual leaves it open */
    if (is_signed<T>() && b == (T)-1) return (T)(0 - (uint64_t)(int64_t)a); /* the lowest number overflows */
    return (T)(a / b);
}
template <typename T> T ptx_rem(T a, T b) { return !b ? a : is_signed<T>() && b == (T)-1 ? (T)0 : (T)(a % b); }

template <typename T> T ptx_min(T a, T b) { return b < a ? b : a; }
template <typename T> T ptx_max(T a, T b) { return b > a ? b : a; }
/* The number if one of them is a NaN; -0 is less than 0. */
template <typename T> T float_min(T a, T b) {
    if (a != a && b != b) return ptx_nan(a + b);
    if (ptx_unordered(a, b)) return a != a ? b : a;
    return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <typename T> T float_max(T a, T b) {
    if (a != a && b != b) return ptx_nan(a + b);
    if (ptx_unordered(a, b)) return a != a ? b : a;
    return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
template <> inline float ptx_min(float a, float b) { return float_min(a, b); }
template <> inline float ptx_max(float a, float b) { return float_max(a, b); }
template <> inline double ptx_min(double a, double b) { return float_min(a, b); }
template <> inline double ptx_max(double a, double b) { return float_max(a, b); }

/* ---- bits */

template <typename T> T ptx_shl(T x, uint32_t by) { return by >= width<T>() ? (T)0 : (T)((uint64_t)x << by); }
template <typename T> T ptx_shr(T x, uint32_t by) { return by >= width<T>() ? (x < 0 ? (T)-1 : (T)0) : (T)(x >> by); }
template <typename T> uint64_t unsigned_of(T x) { return (uint64_t)x & (~0ull >> (64 - width<T>())); }
template <typename T> uint32_t ptx_popc(T x) { return (uint32_t)__builtin_popcountll(unsigned_of(x)); }
template <typename T> uint32_t ptx_clz(T x) {
    return unsigned_of(x) ? (uint32_t)__builtin_clzll(unsigned_of(x)) - (64 - width<T>()) : width<T>();
}
/* The place of the highest bit that is not the sign's, or of the highest 1. */
template <typename T> uint32_t ptx_bfind(T x) {
    const uint64_t u = unsigned_of(x < 0 ? (T)~x : x);
    return u ? 63u - (uint32_t)__builtin_clzll(u) : 0xffffffffu;
}
template <typename T> uint32_t ptx_shiftamt(T x) {
    const uint32_t at = ptx_bfind(x);
    return at == 0xffffffffu ? at : width<T>() - 1 - at;
}
template <typename T> T ptx_brev(T x) {
    T r = 0;
    for (uint32_t i = 0; i < width<T>(); i++) r = (T)(r | (T)(x >> i & 1) << (width<T>() - 1 - i));
    return r;
}
template <typename T> T ptx_bfi(T a, T b, uint32_t at, uint32_t length) {
    at &= 255, length &= 255;
    for (uint32_t i = 0; i < length && at + i < width<T>(); i++)
        b = (T)((b & ~((T)1 << (at + i))) | (i < width<T>() ? (T)(a >> i & 1) << (at + i) : (T)0));
    return b;
}
template <typename T> T ptx_bfe(T a, uint32_t at, uint32_t length) {
    at &= 255, length &= 255;
    const uint32_t last = at + length - 1 < width<T>() - 1 ? at + length - 1 : width<T>() - 1;
    const bool fill = length && is_signed<T>() && unsigned_of(a) >> last & 1;
    uint64_t r = fill ? ~0ull : 0;
    for (uint32_t i = 0; i < length && i < width<T>(); i++) {
        const bool bit = at + i < width<T>() ? unsigned_of(a) >> (at + i) & 1 : fill;
        r = (r & ~(1ull << i)) | (uint64_t)bit << i;
    }
    return (T)r;
}
inline uint32_t ptx_prmt(uint32_t a, uint32_t b, uint32_t how) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t which = how >> 4 * i & 15;
        uint32_t byte = (uint32_t)(both >> 8 * (which & 7)) & 255;
        if (which & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}
inline uint32_t ptx_lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t truth) {
    uint32_t r = 0;
    for (uint32_t k = 0; k < 8; k++)
        if (truth >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return r;
}

/* ---- memory */

extern "C" {
void __tsan_read1(void *), __tsan_read2(void *), __tsan_read4(void *), __tsan_read8(void *), __tsan_read16(void *);
void __tsan_write1(void *), __tsan_write2(void *), __tsan_write4(void *), __tsan_write8(void *), __tsan_write16(void *);
}

template <uint32_t N> void ptx_aligned(const unsigned char *at) {
    if ((uint64_t)at % N) emulate::stop("an access of %u bytes at an address that is no multiple of it", N);
}
/* ACQUIRES: of a thread that waits for others, which must run meanwhile; it sees what they did before they released. */
template <uint32_t N, bool ACQUIRES> inline __attribute__((always_inline)) void ptx_reads(const unsigned char *at) {
    ptx_aligned<N>(at);
    void *const p = (void *)at;
    if (ACQUIRES) {
        emulate::give_way(true);
        emulate::atomic(at, N);
        emulate::fence();
        return;
    }
#ifdef SID_PTX_WATCHED
    N == 1   ? __tsan_read1(p)
    : N == 2 ? __tsan_read2(p)
    : N == 4 ? __tsan_read4(p)
    : N == 8 ? __tsan_read8(p)
             : __tsan_read16(p);
#else
    (void)p;
#endif
}
template <uint32_t N> inline __attribute__((always_inline)) void ptx_writes(unsigned char *p) {
    ptx_aligned<N>(p);
#ifdef SID_PTX_WATCHED
    N == 1   ? __tsan_write1(p)
    : N == 2 ? __tsan_write2(p)
    : N == 4 ? __tsan_write4(p)
    : N == 8 ? __tsan_write8(p)
             : __tsan_write16(p);
#endif
}
template <typename T> T ptx_get(const unsigned char *at) {
    T x;
    memcpy(&x, at, sizeof x);
    return x;
}
template <typename T> void ptx_put(unsigned char *at, T x) { memcpy(at, &x, sizeof x); }

/* The word that a grid's barrier counts in, as its address's upper and lower half; not in the extension, whose variables
 * the emulation takes for shared memory. */
inline uint32_t ptx_grid(int half) {
    static uint32_t word[16];
    return (uint32_t)((uint64_t)word >> (half == 1 ? 32 : 0));
}

#define PTX_ATOMIC(name, expression)                                                                                   \
    template <typename T> T ptx_atomic_##name(unsigned char *at, T x) {                                                \
        ptx_aligned<sizeof(T)>(at);                                                                                    \
        emulate::atomic(at, sizeof(T));                                                                                \
        const T old = ptx_get<T>(at);                                                                                  \
        ptx_put<T>(at, (T)(expression));                                                                               \
        return old;                                                                                                    \
    }                                                                                                                  \
    template <typename T> T ptx_redux_##name(T old, T x) { return (T)(expression); }
PTX_ATOMIC(add, old + x)
PTX_ATOMIC(and, old &x)
PTX_ATOMIC(or, old | x)
PTX_ATOMIC(xor, old ^ x)
PTX_ATOMIC(min, x < old ? x : old)
PTX_ATOMIC(max, x > old ? x : old)
PTX_ATOMIC(exch, x)
template <typename T> T ptx_atomic_cas(unsigned char *at, T was, T x) {
    ptx_aligned<sizeof(T)>(at);
    emulate::atomic(at, sizeof(T));
    const T old = ptx_get<T>(at);
    if (old == was) ptx_put<T>(at, x);
    return old;
}

/* Over the lanes of a mask, each of which gets the result. */
template <typename T> T ptx_redux(T (*join)(T, T), T x, uint32_t mask) {
    T all = 0;
    bool any = false;
    for (uint32_t lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        const T other = (T)emulate::meet(emulate::SHUFFLE, (uint64_t)x, lane, mask);
        all = any ? join(all, other) : other;
        any = true;
    }
    return all;
}

} // namespace

#endif
