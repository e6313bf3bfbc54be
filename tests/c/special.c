/* special.h at known values, and the sums that fits read against plain loops, on every instruction set. */
#include "special.h"

#include <math.h>

#include "internal.h"
#include "test.h"

void test_special(void);
void test_moments(void);

static int close_to(double x, double want, double by) { return fabs(x - want) <= by * fabs(want); }

void test_special(void) {
    static const struct {
        double x, lgamma, digamma, trigamma;
    } known[] = {
        {1e-8, 18.4206807381802089, -100000000.577215646, 10000000000000001.2},
        {0.3, 1.09579799481807556, -3.50252422220013312, 12.2453645461077313},
        {0.9999999, 5.77215746844419283e-8, -0.577215829394951479, 1.64493430725963941},
        {1.0000001, -5.7721558299185071e-8, -0.5772155004081381, 1.64493382643687813},
        {1.75, -0.084401121020485556, 0.247472453546861164, 0.764101869893828721},
        {2.0000001, 4.22784366653249792e-8, 0.422784399591871698, 0.64493402643684834},
        {3.25, 0.935801931108725358, 1.01699091106817904, 0.359798290309579875},
        {11.5, 16.2920004765672413, 2.39823912953578161, 0.0908466612745462343},
        {1000, 5905.22042320918121, 6.90725519564881205, 0.00100050016666663333},
    };
    static const struct {
        double q, z;
    } tails[] = {
        {0.5, 0},
        {0.49, 0.025068908258711058},
        {0.05, 1.64485362695147269},
        {5e-4, 3.29052673149189479},
        {1e-7, 5.19933758219281694},
        {1e-100, 21.2734535609653243},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const double x = known[i].x;
        CHECK(close_to(sid_lgamma(x), known[i].lgamma, 1e-12), "log-gamma of %g: %.17g", x, sid_lgamma(x));
        CHECK(close_to(sid_digamma(x), known[i].digamma, 1e-12), "digamma of %g: %.17g", x, sid_digamma(x));
        CHECK(close_to(sid_trigamma(x), known[i].trigamma, 1e-12), "trigamma of %g: %.17g", x, sid_trigamma(x));
    }
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        const double z = sid_normal_tail(tails[i].q);
        CHECK(close_to(z, tails[i].z, 1e-12), "normal tail %g: %.17g", tails[i].q, z);
    }
    for (double x = 0x1p-1074; x < 0x1p1000; x *= 1.7e3)
        CHECK(fabs(sid_log(x) - log(x)) <= 4e-16 * fabs(log(x)), "log of %g: %.17g", x, sid_log(x));
    for (double x = -700; x < 700; x += 0.37)
        CHECK(close_to(sid_exp(x), exp(x), 4e-16), "exp of %g: %.17g", x, sid_exp(x));
}

/* 0: normal numbers; 1: with zeros; 2: with denormal ones; 3: huge ones. */
static float element(rng *r, int kind) {
    const float x = ldexpf(rng_normal(r), (int)rng_below(r, 60) - 30);
    if (kind == 1 && rng_below(r, 3) == 0) return 0;
    if (kind == 2 && rng_below(r, 50) == 0) return sid_bits_f32(rng_below(r, 0x800000));
    return kind == 3 ? ldexpf(rng_normal(r) < 0 ? -1.0f : 1.5f, 127) : x;
}

void test_moments(void) {
    static const uint32_t lens[] = {0, 1, 15, 16, 17, 127, 128, 129, 500, 1000, 1023, 1024};
    rng r = {9};
    for (int kind = 0; kind < 4; kind++)
        for (size_t l = 0; l < sizeof lens / sizeof *lens; l++) {
            static float x[4096];
            const uint32_t n = lens[l];
            double logs = 0, size = 0, square = 0, plain = 0, tail = 0, tail2 = 0;
            uint32_t some = 0, above = 0;
            for (uint32_t i = 0; i < n; i++) x[i] = element(&r, kind);
            const uint32_t key = sid_key(n ? x[n / 2] : 1.0f);
            for (uint32_t i = 0; i < n; i++) {
                const double v = (double)x[i], a = fabs(v);
                size += a, square += v * v, plain += v;
                if (a > 0) logs += log2(a), some++;
                if (sid_key(x[i]) >= key) tail += a, tail2 += a * a, above++;
            }
            double first[3] = {0, 0, 0}, first_logs = 0;
            for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
                const sid_simd *v = sid_simd_for((sid_isa)isa);
                double m[3];
                uint32_t count = 77, c[2];
                if (!v) continue;
                v->moments(x, n, m);
                CHECK(close_to(m[0], size, 1e-13) && close_to(m[1], square, 1e-13) &&
                          fabs(m[2] - plain) <= 1e-13 * size,
                      "%s: moments of %u, kind %d: %g %g %g", v->name, n, kind, m[0], m[1], m[2]);
                float f[5];
                const double at = (double)sid_bits_f32(key);
                v->square_sums(x, n, f);
                CHECK(kind == 3 || (close_to((double)f[0], size, 1e-5) && close_to((double)f[1], square, 1e-5) &&
                                    fabs((double)f[2] - plain) <= 1e-5 * size),
                      "%s: square sums of %u, kind %d", v->name, n, kind);
                v->probe_sums(x, n, 0, key, f, c);
                CHECK(c[0] == n && c[1] == above, "%s: %u and %u of %u above", v->name, c[0], c[1], n);
                CHECK(kind == 3 || (close_to((double)f[2], size, 1e-5) && close_to((double)f[1], square, 1e-5) &&
                                    close_to((double)f[3], tail - above * at, 1e-5) &&
                                    fabs((double)f[4] - (tail2 - 2 * at * tail + above * at * at)) <= 1e-5 * tail2),
                      "%s: probe sums of %u, kind %d", v->name, n, kind);
                const double got = v->sum_log2(x, n, &count);
                CHECK(count == some && fabs(got - logs) <= 6e-8 * some,
                      "%s: logarithms of %u, kind %d: %.10g, not %.10g", v->name, n, kind, got, logs);
                if (isa == SID_ISA_BASE) memcpy(first, m, sizeof m), first_logs = got;
                CHECK(!memcmp(first, m, sizeof m) && !memcmp(&first_logs, &got, 8), "%s is not the base's", v->name);
            }
        }
}
