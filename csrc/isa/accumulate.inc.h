/* simd.c: what memories do to a tile: add the gradient to what is kept, with or without weights or a velocity; set what was sent to
 * zero, or take one value off it; and one side of a vector alone.
 *
 * Each element is computed by itself, as weighted_each and velocity_each have it: each product is rounded, then their sum, then the
 * sum saturates at the largest float. Nothing is contracted. Vector code leaves tiles that may saturate to these loops. */

/* add_weighted, an element at a time. */
static int weighted_each(float *acc, const float *g, uint32_t n, uint32_t key, float beta, float gamma) {
    int any = 0;
    for (uint32_t i = 0; i < n; i++) {
        const int ok = sid_key(g[i]) < SID_KEY_INF;
        acc[i] = sid_saturated((sid_key(acc[i]) >= key ? 0.0f : acc[i]) * beta + (ok ? g[i] : 0.0f) * gamma);
        any |= !ok;
    }
    return any == 0;
}

INLINE int any_beyond(vi key) { return mask_of(key > 0x7f7fffff) != 0; }

/* Kept values are finite. If a sum is finite too, then so was the addend, and there is nothing to saturate. Weights of 1
 * are known when this is inlined, and leave no product; if nothing was sent, there is no comparison either. */
INLINE int weighted(float *acc, const float *g, uint32_t n, uint32_t key, const float beta, const float gamma,
                    const int whole) {
    const vi sent = wide_key(key);
    uint32_t i = 0;
    int ok = 1;
    for (; i + FOUR <= n; i += FOUR) {
        vf sum[4];
        vi top = {0};
        for (uint32_t q = 0; q < 4; q++) {
            const vf a = load(acc + i + q * WIDE);
            sum[q] = (whole ? a : below(a, keys(a), sent)) * beta + load(g + i + q * WIDE) * gamma;
            top = higher(top, keys(sum[q]));
        }
        if (any_beyond(top))
            ok &= weighted_each(acc + i, g + i, FOUR, key, beta, gamma);
        else
            for (uint32_t q = 0; q < 4; q++) store(acc + i + q * WIDE, sum[q]);
    }
    return ok & weighted_each(acc + i, g + i, n - i, key, beta, gamma);
}

static int add_kept(float *acc, const float *g, uint32_t n, uint32_t key) {
    return key > 0x7fffffffu ? weighted(acc, g, n, key, 1, 1, 1) : weighted(acc, g, n, key, 1, 1, 0);
}
static int add_weighted(float *acc, const float *g, uint32_t n, uint32_t key, float beta, float gamma) {
    return weighted(acc, g, n, key, beta, gamma, 0);
}

/* plain: of_u is 1 and of_g is 0, whose product would be another signed zero. */
INLINE int velocity_each(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                         const sid_velocity *c, const int plain) {
    int any = 0;
    for (uint32_t i = 0; i < n; i++) {
        const int ok = sid_key(g[i]) < SID_KEY_INF;
        const uint32_t k = sid_key(acc[i]);
        const float x = (ok ? g[i] : 0.0f) * c->factor;
        u[i] = sid_saturated((k >= mask ? 0.0f : u[i]) * c->momentum + x);
        /* The step saturates by itself: what is kept, times the carry, may be the other infinity. */
        const float step = plain ? u[i] : sid_saturated(u[i] * c->of_u + x * c->of_g);
        acc[i] = sid_saturated((k >= key ? 0.0f : acc[i]) * c->carry + step);
        any |= !ok;
    }
    return any == 0;
}

INLINE int velocity(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                    const sid_velocity *c, const int plain) {
    const float m = c->momentum, f = c->factor, of_u = c->of_u, of_g = c->of_g, carry = c->carry;
    const vi sent = wide_key(key), masked = wide_key(mask);
    uint32_t i = 0;
    int ok = 1;
    for (; i + FOUR <= n; i += FOUR) {
        vf next[4], sum[4];
        vi top = {0};
        for (uint32_t q = 0; q < 4; q++) {
            const vf a = load(acc + i + q * WIDE), v = load(u + i + q * WIDE), x = load(g + i + q * WIDE) * f;
            const vi k = keys(a);
            next[q] = below(v, k, masked) * m + x;
            sum[q] = below(a, k, sent) * carry + (plain ? next[q] : next[q] * of_u + x * of_g);
            top = higher(top, higher(keys(next[q]), keys(sum[q])));
        }
        if (any_beyond(top)) {
            ok &= velocity_each(acc + i, u + i, g + i, FOUR, key, mask, c, plain);
            continue;
        }
        for (uint32_t q = 0; q < 4; q++) {
            store(u + i + q * WIDE, next[q]);
            store(acc + i + q * WIDE, sum[q]);
        }
    }
    return ok & velocity_each(acc + i, u + i, g + i, n - i, key, mask, c, plain);
}

static int add_velocity(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                        const sid_velocity *c) {
    return c->of_u == 1 && c->of_g == 0 ? velocity(acc, u, g, n, key, mask, c, 1)
                                        : velocity(acc, u, g, n, key, mask, c, 0);
}

static void zero_from(float *acc, uint32_t n, uint32_t key) {
    uint32_t i = 0;
    if (key > 0x7fffffffu) return;
    for (; i + WIDE <= n; i += WIDE) {
        const vf x = load(acc + i);
        store(acc + i, (vf)(bits(x) & (keys(x) < (int32_t)key)));
    }
    for (; i < n; i++) acc[i] = sid_key(acc[i]) >= key ? 0.0f : acc[i];
}

static void one_side(const float *x, float *y, uint32_t n, int negative) {
    const vi flip = (vi){0} + (negative ? (int32_t)0x80000000u : 0);
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const vi v = bits(load(x + i)) ^ flip;
        store(y + i, (vf)(v & (v > 0)));
    }
    for (; i < n; i++) {
        const uint32_t v = sid_f32_bits(x[i]) ^ (negative ? 0x80000000u : 0u);
        y[i] = sid_bits_f32(v >> 31 ? 0 : v);
    }
}

static void subtract_from(float *acc, uint32_t n, uint32_t key, float value) {
    const uint32_t sign = sid_f32_bits(value) & 0x80000000u;
    const vi flip = (vi){0} + (int32_t)sign, low = (vi){0} + (int32_t)key,
             what = (vi){0} + (int32_t)sid_f32_bits(value);
    uint32_t i = 0;
    if (key > 0x7fffffffu) return;
    for (; i + WIDE <= n; i += WIDE) {
        const vf x = load(acc + i);
        store(acc + i, x - (vf)(what & ((bits(x) ^ flip) >= low)));
    }
    for (; i < n; i++) {
        const uint32_t v = sid_f32_bits(acc[i]) ^ sign;
        acc[i] -= v >> 31 || v < key ? 0.0f : value;
    }
}

static void clear_from(float *acc, uint32_t n, uint32_t key, float value) {
    const uint32_t sign = sid_f32_bits(value) & 0x80000000u;
    const vi flip = (vi){0} + (int32_t)sign, low = (vi){0} + (int32_t)key;
    uint32_t i = 0;
    if (key > 0x7fffffffu) return;
    for (; i + WIDE <= n; i += WIDE) {
        const vf x = load(acc + i);
        store(acc + i, (vf)(bits(x) & ~((bits(x) ^ flip) >= low)));
    }
    for (; i < n; i++) {
        const uint32_t v = sid_f32_bits(acc[i]) ^ sign;
        acc[i] = v >> 31 || v < key ? acc[i] : 0.0f;
    }
}
