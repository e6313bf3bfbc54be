/* The functions that fitted distributions need, in float64 from +, -, *, / and integer arithmetic alone (and sqrt, which
 * IEEE fixes), so that every compiler, C library and device gives the same bits. Shared by host and device.
 * Relative errors, as tests/codecs/test_sidco.py measures them against SciPy: log, exp 4e-16, log-gamma, digamma and trigamma
 * 1e-14 (digamma next to its zero at 1.46: 1e-14 of 1), normal quantile 1e-13, gamma quantile 1e-9 over its shape if that
 * is below 1 (1e-6 for shapes from 1e4 on). Arguments outside what is said are the caller's fault. */
#ifndef SID_SPECIAL_H
#define SID_SPECIAL_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "wire.h"

#define SID_LN2_HI 0x1.62e42fefa0000p-1 /* 33 bits: k * SID_LN2_HI is exact */
#define SID_LN2_LO 0x1.cf79abc9e3b3ap-40
#define SID_EULER 0.57721566490153286061

/* x > 0 = m * 2^k, m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)). */
SID_HD double sid_log(double x) {
    int32_t k = 0;
    uint64_t u;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        k = -54;
    }
    memcpy(&u, &x, 8);
    if (u >= 0x7ff0000000000000ull) return x; /* Inf */
    const uint64_t half = 0x3fe6a09e667f3bcdull;
    const uint64_t above = u - half; /* wraps for x < sqrt(1/2): the shift below is that of the two's complement */
    const int64_t e = (int64_t)(above >> 52) - (above >> 63 ? 4096 : 0);
    k += (int32_t)e;
    u -= (uint64_t)e << 52;
    double m;
    memcpy(&m, &u, 8);
    const double f = (m - 1) / (m + 1), s = f * f;
    double p = 0;
    for (int i = 23; i >= 3; i -= 2) p = (p + 1.0 / i) * s;
    return k * SID_LN2_HI + (2 * f + (2 * f * p + k * SID_LN2_LO));
}

/* 0 below -708, Inf above 709. */
SID_HD double sid_exp(double x) {
    if (!(x > -708)) return 0;
    if (x > 709) x = 1e4;
    const double big = 0x1.8p52, k = x > 709 ? 1024 : (x * 0x1.71547652b82fep0 + big) - big; /* the nearest integer */
    const double r = x > 709 ? 0 : (x - k * SID_LN2_HI) - k * SID_LN2_LO;
    double p = 1;
    for (int i = 14; i >= 1; i--) p = 1 + p * r / i;
    const uint64_t u = (uint64_t)((int64_t)k + 1023) << 52;
    double scale;
    memcpy(&scale, &u, 8);
    return p * scale;
}

/* (exp(x) - 1) / x, 1 at 0. */
SID_HD double sid_expm1_over(double x) {
    if (x > 1 || x < -1) return (sid_exp(x) - 1) / x;
    double p = 1;
    for (int i = 19; i >= 2; i--) p = 1 + p * x / i;
    return p;
}

/* sum over k >= 2 of (-1)^k (zeta(k) - 1) t^k / k, |t| <= 1/2: what log Gamma(2 + t) is beside (1 - Euler) t. */
SID_HD double sid_zeta_sum(double t) {
    const double zeta[] = {
        6.44934066848226436472e-1, 2.02056903159594285400e-1, 8.23232337111381915160e-2, 3.69277551433699263314e-2,
        1.73430619844491397145e-2, 8.34927738192282683980e-3, 4.07735619794433937869e-3, 2.00839282608221441785e-3,
        9.94575127818085337146e-4, 4.94188604119464558702e-4, 2.46086553308048298638e-4, 1.22713347578489146752e-4,
        6.12481350587048292585e-5, 3.05882363070204935517e-5, 1.52822594086518717326e-5, 7.63719763789976227360e-6,
        3.81729326499983985646e-6, 1.90821271655393892566e-6, 9.53962033872796113152e-7, 4.76932986787806463117e-7,
        2.38450502727732990004e-7, 1.19219925965311073068e-7, 5.96081890512594796124e-8, 2.98035035146522801861e-8,
        1.49015548283650412347e-8, 7.45071178983542949198e-9}; /* zeta(k) - 1 for k = 2, 3, ... */
    double p = 0;
    for (int k = 27; k >= 2; k--) p = zeta[k - 2] / k - t * p;
    return p * t * t;
}

/* log Gamma(x), x > 0. By the recurrence to [1.5, 2.5], where the series holds; from 12 on by Stirling's. x - 1 and x - 2
 * are exact where they matter: next to the zeros at 1 and 2. */
SID_HD double sid_lgamma(double x) {
    if (x < 1.5) {
        const double t = x < 0.5 ? x : x - 1, up = (1 - SID_EULER) * t + sid_zeta_sum(t) - sid_log(x);
        return x < 0.5 ? up - sid_log(1 + x) : up;
    }
    if (x < 12) {
        double factor = 1;
        while (x > 2.5) factor *= x -= 1;
        const double t = x - 2;
        return (1 - SID_EULER) * t + sid_zeta_sum(t) + sid_log(factor);
    }
    const double y = 1 / x, s = y * y;
    const double c[] = {1.0 / 12, -1.0 / 360, 1.0 / 1260, -1.0 / 1680, 1.0 / 1188, -691.0 / 360360, 1.0 / 156};
    double p = 0;
    for (int i = 6; i >= 0; i--) p = c[i] + s * p;
    return (x - 0.5) * (sid_log(x) - 1) + (0.91893853320467274178 - 0.5) + p * y;
}

/* d/dx log Gamma(x), x > 0. By the recurrence up to 10, then asymptotically. */
SID_HD double sid_digamma(double x) {
    double down = 0;
    for (; x < 10; x += 1) down += 1 / x;
    const double s = 1 / (x * x);
    const double c[] = {1.0 / 12,  -1.0 / 120,     1.0 / 252, -1.0 / 240,
                        1.0 / 132, -691.0 / 32760, 1.0 / 12,  -3617.0 / 8160};
    double p = 0;
    for (int i = 7; i >= 0; i--) p = c[i] + s * p;
    return sid_log(x) - 0.5 / x - s * p - down;
}

/* Its derivative. */
SID_HD double sid_trigamma(double x) {
    double up = 0;
    for (; x < 10; x += 1) up += 1 / (x * x);
    const double y = 1 / x, s = y * y;
    const double c[] = {1.0 / 6, -1.0 / 30, 1.0 / 42, -1.0 / 30, 5.0 / 66, -691.0 / 2730, 7.0 / 6, -3617.0 / 510};
    double p = 0;
    for (int i = 7; i >= 0; i--) p = c[i] + s * p;
    return y + 0.5 * s + s * y * p + up;
}

/* Probability that a standard normal variable exceeds z >= 0, over its density there (Mills' ratio). */
SID_HD double sid_mills(double z) {
    if (z < 3) { /* (1/2 - Phi(0 .. z)) / phi: a series of positive terms */
        double term = z, sum = z;
        for (int i = 3; i < 80; i += 2) sum += term *= z * z / i;
        return 1.25331413731550025121 * sid_exp(z * z / 2) - sum;
    }
    double f = z;
    for (int i = 60; i >= 1; i--) f = z + i / f;
    return 1 / f;
}

/* z with P(standard normal > z) = q, 0 < q <= 1/2, as small as 1e-300. Newton on log P(z), which is concave: from the left
 * of the root it cannot fail; 1/2 - Phi has its steepest place at 0, so the first step from there is to the left. */
SID_HD double sid_normal_tail(double q) {
    const double want = sid_log(q), root2pi = 0.91893853320467274178;
    double z = 0;
    for (int i = 0; i < 64; i++) {
        const double m = sid_mills(z);
        const double step = (sid_log(m) - z * z / 2 - root2pi - want) * m; /* d/dz log P = -1 / m */
        z += step;
        if (z < 0) z = 0;
        if (step < 1e-15 * (1 + z) && step > -1e-15 * (1 + z)) break;
    }
    return z;
}

/* log Q(a, x): the probability that a gamma variable of shape a and scale 1 exceeds x. 0.003 < a <= 1e4, x > 0. A series of
 * positive terms below a + 1, and the continued fraction of Q above. */
SID_HD double sid_log_gamma_above(double a, double x) {
    const double density = a * sid_log(x) - x - sid_lgamma(a); /* log of x times it */
    if (x < a + 1) {
        double term = 1 / a, sum = term;
        for (int i = 1; i < 4000 && term > 1e-17 * sum; i++) sum += term *= x / (a + i);
        const double above = 1 - sid_exp(density) * sum;
        return sid_log(above > 1e-300 ? above : 1e-300);
    }
    double b = x + 1 - a, c = 1e300, d = 1 / b, f = d;
    for (int i = 1; i < 4000; i++) {
        const double part = i * (a - i);
        b += 2;
        d = 1 / (part * d + b);
        c = b + part / c;
        f *= c * d;
        if (c * d - 1 < 1e-16 && c * d - 1 > -1e-16) break;
    }
    return density + sid_log(f);
}

/* x with Q(a, x) = exp(-log_inverse), log_inverse > 0: Newton in log x, and the middle of what brackets the root where that
 * would leave it. From a = 1e4 on Wilson and Hilferty's cube, which is then right to 1e-6. */
SID_HD double sid_gamma_tail(double a, double log_inverse) {
    const double q = sid_exp(-log_inverse), z = q <= 0.5 ? sid_normal_tail(q > 1e-300 ? q : 1e-300)
                                                         : -sid_normal_tail(1 - q > 1e-300 ? 1 - q : 1e-300);
    const double root = 1 - 1 / (9 * a) + z / (3 * sqrt(a)), cube = a * root * root * root;
    if (a > 1e4) return cube;
    double low = 0, high = 0, x = cube > 0 && a >= 1 ? cube : log_inverse - sid_lgamma(a);
    if (!(x > 0)) x = sid_exp((sid_log(1 - q > 1e-300 ? 1 - q : 1e-300) + sid_lgamma(1 + a)) / a);
    if (!(x > 0)) return 0;
    for (int i = 0; i < 100; i++) {
        const double above = sid_log_gamma_above(a, x), off = above + log_inverse;
        if (off > 0)
            low = x;
        else
            high = x;
        const double falls = sid_exp(a * sid_log(x) - x - sid_lgamma(a) - above); /* -d log Q / d log x */
        double step = falls > 0 ? off / falls : 0;
        step = step > 2 ? 2 : step < -2 ? -2 : step;
        double next = x * sid_exp(step);
        if (high > 0 && !(next > low && next < high)) next = low > 0 ? sqrt(low) * sqrt(high) : high / 8;
        const double moved = next - x;
        x = next;
        if (moved < 1e-13 * x && moved > -1e-13 * x) break;
    }
    return x;
}

#endif
