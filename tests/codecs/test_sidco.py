"""SIDCo's fits: special functions, known distributions, moments that make no sense, adaptation."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
from buffers import Rank, Vector
from reference import Array, Step
from scipy import special, stats
from sidcomp import _core

ROOT = Path(__file__).resolve().parents[2]
FAMILY = ("sidco-e", "sidco-gp", "sidco-p")
FUNCTIONS = ("log", "exp", "expm1_over", "lgamma", "digamma", "trigamma", "normal_tail")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[float], float]]:
    """csrc/special.h's functions, as the C compiler of this machine makes them."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("special")
    body = "".join(f"double t_{f}(double x) {{ return sid_{f}(x); }}\n" for f in FUNCTIONS)
    body += "double t_gamma_tail(double a, double x) { return sid_gamma_tail(a, x); }\n"
    (folder / "t.c").write_text('#include "special.h"\n' + body)
    command = [*compiler.split(), "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, str(folder / "t.c"), "-o", str(folder / "t.so")], check=True)
    library = ctypes.CDLL(str(folder / "t.so"))
    out = {}
    for name in FUNCTIONS:
        function = getattr(library, f"t_{name}")
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
        out[name] = function
    library.t_gamma_tail.restype = ctypes.c_double
    library.t_gamma_tail.argtypes = [ctypes.c_double, ctypes.c_double]
    out["gamma_tail"] = library.t_gamma_tail
    return out


def arguments(name: str) -> Array:
    rng = np.random.default_rng(1)
    positive = np.concatenate(
        [
            10 ** rng.uniform(-300, 300, 300),
            rng.uniform(0, 30, 600),
            1 + rng.uniform(-1e-6, 1e-6, 100),
            2 + rng.uniform(-1e-6, 1e-6, 100),
            [0.5, 1.5, 2.5, 10, 12],
        ]
    )
    if name == "exp":
        return rng.uniform(-700, 700, 600)
    if name == "expm1_over":
        return np.concatenate([rng.uniform(-40, 40, 600), 10 ** rng.uniform(-20, 0, 100)])
    if name == "normal_tail":
        return np.concatenate([10 ** rng.uniform(-300, -0.31, 300), 0.5 - 10 ** rng.uniform(-6, -1, 100)])
    if "gamma" in name and name != "lgamma":
        return positive[(positive > 1e-140) & (positive < 1e140)]
    return positive


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_functions(name: str, compiled: dict[str, Callable[[float], float]]) -> None:
    """To 1e-12, relatively; a function next to a zero of its own, other than 1 and 2, to 1e-14 of 1."""
    mp: Any = pytest.importorskip("mpmath")
    mp.mp.dps = 40
    exact = {
        "log": mp.log,
        "exp": mp.exp,
        "expm1_over": lambda x: mp.expm1(x) / x,
        "lgamma": mp.loggamma,
        "digamma": mp.digamma,
        "trigamma": lambda x: mp.psi(1, x),
    }
    for x in map(float, arguments(name)):
        got = compiled[name](x)
        if name == "normal_tail":  # the other way round: the tail beyond what it gave
            tail = mp.erfc(mp.mpf(got) / mp.sqrt(2)) / 2
            density = mp.exp(-(mp.mpf(got) ** 2) / 2) / mp.sqrt(2 * mp.pi)
            assert abs(tail - x) / density <= 1e-12 * max(got, 0.01), x
            continue
        want = exact[name](mp.mpf(x))
        floor = 0.01 if name == "digamma" else 0
        assert abs(got - want) <= 1e-12 * max(abs(want), floor), (x, got, want)


def test_the_gamma_distributions_quantile(compiled: dict[str, Any]) -> None:
    """To 1e-9 of SciPy's, over the shape if that is below 1; from 1e4 on to 1e-6. No float32 magnitudes have
    the least of these shapes."""
    for shape in (0.004, 0.01, 0.05, 0.2, 0.4, 0.8, 1.0, 1.5, 3.0, 20.0, 400.0, 9000.0, 2e4, 1e8):
        for q in (0.999, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01, 1e-3, 1e-5, 1e-7):
            want = float(special.gammainccinv(shape, q))
            got = compiled["gamma_tail"](shape, -math.log(q))
            near = 1e-6 if shape > 1e4 else 1e-9 / min(shape, 1)  # a small shape magnifies the error of q
            assert got == pytest.approx(want, rel=near, abs=1e-290), (shape, q)


def test_special_functions_at_the_ends(compiled: dict[str, Callable[[float], float]]) -> None:
    assert compiled["log"](1.0) == 0 and compiled["lgamma"](1.0) == 0 and compiled["lgamma"](2.0) == 0
    assert compiled["log"](5e-324) == pytest.approx(-744.4400719213812, rel=1e-15)
    assert compiled["log"](math.inf) == math.inf
    assert compiled["exp"](-1e300) == 0 and compiled["exp"](0.0) == 1 and compiled["exp"](1e300) == math.inf
    assert compiled["expm1_over"](0.0) == 1 and compiled["expm1_over"](-1e300) == 1e-300
    assert compiled["normal_tail"](0.5) == 0
    assert compiled["normal_tail"](0.025) == pytest.approx(1.959963984540054, rel=1e-13)


# ---- quantiles -----------------------------------------------------------------------------------


def spaced(quantile: Callable[[Array], Array], n: int = 100_000) -> Array:
    """A vector that has the distribution, as well as n elements can; signs in turn, shuffled."""
    x = quantile((np.arange(n) + 0.5) / n) * np.where(np.arange(n) % 2, 1, -1)
    return np.random.default_rng(0).permutation(x).astype(np.float32)


def encode(codec: str, x: Array, memory: str = "none", **settings: Any) -> tuple[Rank, dict[str, Any]]:
    rank = Rank(_core.Plan(codec, memory, len(x), "float32", settings))
    payload = rank.encode(Vector(x), Step())
    return rank, ref.header(payload)


def threshold(codec: str, x: Array, **settings: Any) -> float:
    """Before any cut to the capacity."""
    return float(encode(codec, x, capacity=1e6, **settings)[1]["scale"])


def test_the_exponential_distribution_is_all_threes() -> None:
    """Each fit is right; Minka's shape, 1 % off, makes 6 % at a density of .001."""
    for density in (0.1, 0.01, 0.001):
        n = 100_000
        x = spaced(lambda p: -np.log1p(-p), n)
        for codec in FAMILY:
            found = encode(codec, x, density=density, capacity=10.0)[0].stats.found
            assert found == pytest.approx(density * n, rel=0.07 if codec == "sidco-gp" else 0.03), codec


@pytest.mark.parametrize("shape", [-1.0, -0.4, -0.1, 0.1, 0.2])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_pareto_distribution_is_found(shape: float, stages: int) -> None:
    """Moment estimates hit the quantile of a generalised Pareto distribution, in one stage and in several.

    As the shape nears 1/4 the fourth moment goes, and with it the estimate's precision.
    """
    n, density = 400_000, 0.001
    x = spaced(lambda p: ((1 - p) ** -shape - 1) / shape, n)
    magnitude = np.abs(x.astype(np.float64))
    ratios = ref.stage_ratios(density, 0.25, stages)
    eta = ref.sidco_thresholds(magnitude, ratios, later=ref.pareto_quantile)[0]
    assert (magnitude >= eta).mean() == pytest.approx(density, rel=0.1)
    if stages == 1:
        assert threshold("sidco-p", x, density=density) == pytest.approx(eta, rel=1e-5)
        assert eta == pytest.approx((density**-shape - 1) / shape, rel=0.02)


def test_pareto_by_hand() -> None:
    """|x| = 1, 2, 3, 6: mu = 3, variance 3.5, so mu^2/s2 = 18/7, a = -11/14, b = 75/14."""
    x = np.array([1, -2, 3, -6], np.float32)
    want = 75 / 11 * (1 - 0.5 ** (11 / 14))
    assert threshold("sidco-p", x, density=0.5) == pytest.approx(want, rel=1e-6)
    assert want == pytest.approx(2.8632, rel=1e-4)


@pytest.mark.parametrize("shape", ["closed", "mle"])
def test_gamma_by_scipy(shape: str) -> None:
    """The shape is that of maximum likelihood, or within 1.5 % of it in the closed form, as Minka says."""
    rng = np.random.default_rng(3)
    for alpha in (0.4, 0.7, 1.0):
        x = (rng.gamma(alpha, 2e-4, 50_000) * rng.choice([-1, 1], 50_000)).astype(np.float32)
        x = x[x != 0]
        fitted, _, beta = stats.gamma.fit(np.abs(x.astype(np.float64)), floc=0)
        want = -beta * (math.log(0.01) + special.gammaln(fitted))
        exact = threshold("sidco-gp", x, density=0.01, shape=shape)
        assert exact == pytest.approx(
            beta * special.gammainccinv(fitted, 0.01), rel=1e-4 if shape == "mle" else 0.02
        )
        got = threshold("sidco-gp", x, density=0.01, shape=shape, quantile="bound")
        assert got == pytest.approx(want, rel=1e-4 if shape == "mle" else 0.02)


def test_what_the_gamma_approximation_costs() -> None:
    """Equation (15) against the quantile itself, (14): exact at shape 1, an overestimate below. (14) is the
    default, and right where the shape is that of maximum likelihood."""
    n, density = 200_000, 0.01
    over = {}
    for alpha in (0.4, 0.7, 1.0):
        x = spaced(lambda p, a=alpha: special.gammaincinv(a, p), n)
        want = special.gammainccinv(alpha, density)
        over[alpha] = threshold("sidco-gp", x, density=density, quantile="bound") / want - 1
        assert threshold("sidco-gp", x, density=density, shape="mle") == pytest.approx(want, rel=0.01)
    assert abs(over[1.0]) < 0.01 < over[0.7] < over[0.4] < 0.6


def test_zeros_do_not_bend_the_gamma_fit() -> None:
    """Nine zeros for every element: the same distribution, a tenth of the density, the same threshold."""
    x = spaced(lambda p: special.gammaincinv(0.6, p), 20_000)
    padded = np.random.default_rng(0).permutation(np.concatenate([x, np.zeros(180_000, np.float32)]))
    assert threshold("sidco-gp", padded, density=0.001) == pytest.approx(
        threshold("sidco-gp", x, density=0.01), rel=1e-6
    )


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-140, 1e-38, 1.0, 1e34])
def test_any_scale(scale: float) -> None:
    """The logarithms of denormal numbers, and squares beyond float32."""
    x = spaced(lambda p: np.floor(1 - 300 * np.log1p(-p)))
    for codec in FAMILY:
        one = threshold(codec, x, density=0.02)
        got = threshold(codec, (x.astype(np.float64) * scale).astype(np.float32), density=0.02)
        assert got == pytest.approx(one * scale, rel=1e-5, abs=0.6 * 2.0**-149)


# ---- moments that make no sense ------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*FAMILY, "gaussiank"])
def test_degenerate_vectors(codec: str) -> None:
    """Nothing is lost, step after step; a threshold beyond float32 is Inf, and nothing passes."""
    n = 3000
    one, two, spike = (np.zeros(n, np.float32) for _ in range(3))
    one[17], two[[5, 6]], spike[:] = 3.0, 3e38, 1e-3
    spike[99] = 1e30
    equal = np.full(n, -0.125, np.float32)
    near = np.where(np.arange(n) % 2, np.float32(1), np.nextafter(np.float32(1), np.float32(2)))
    for x in (one, two, spike, equal, near, np.zeros(n, np.float32), np.full(n, ref.FLT_MAX, np.float32)):
        for stages in (1, 3):
            settings = {"rounds": stages} if codec == "gaussiank" else {"max_stages": stages, "Q": 1}
            rank = Rank(_core.Plan(codec, "residual", n, "float32", settings | {"density": 0.01}))
            kept = np.zeros(n)
            for step in range(6):
                payload = rank.encode(Vector(x), Step(step=step))
                head = ref.header(payload)
                assert head["scale"] >= 0 and (np.isfinite(head["scale"]) or not head["count"])
                acc = ref.saturate(x.astype(np.float64) + kept)
                kept = rank.residual()[0].astype(np.float64)
                assert (rank.decoded([payload]) + kept == acc).all()


def test_equal_magnitudes_pass_a_pareto() -> None:
    """Without variance the threshold is the magnitude itself; the payload's capacity then decides."""
    x = np.full(5000, 0.1, np.float32)
    rank, head = encode("sidco-p", x, density=0.01)
    assert rank.stats.found == 5000 and head["count"] == 63 and head["flags"] & ref.RAISED


def test_a_gamma_quantile_below_zero_is_zero() -> None:
    """Shape 0.05: log Gamma is 2.97, more than log(1 / 0.25), so (15) is below 0 for the inner stages."""
    x = spaced(lambda p: special.gammaincinv(0.05, p), 50_000)
    magnitude = np.abs(x[x != 0]).astype(np.float64)
    assert ref.gamma_quantile(magnitude, 0.25, True) == 0
    assert threshold("sidco-gp", x, density=0.25, quantile="bound") == 0
    assert threshold("sidco-gp", x, density=0.25) > 0


# ---- stages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", FAMILY)
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_adaptation_comes_within_the_tolerance(codec: str, density: float) -> None:
    """Laplace gradients without feedback, from whatever number of stages: the 20 % of the paper."""
    n = 200_000
    rank = Rank(_core.Plan(codec, "none", n, "float32", {"density": density}))
    ratio = []
    for step in range(40):
        x = np.random.default_rng(step).laplace(0, 1, n).astype(np.float32)
        rank.encode(Vector(x), Step(step=step))
        ratio.append(rank.stats.found / (density * n))
    assert abs(float(np.mean(ratio[20:])) - 1) < 0.2


@pytest.mark.parametrize("codec", FAMILY)
def test_stages_move_by_one_every_q_steps(codec: str) -> None:
    """Student t with 3 degrees of freedom: one stage is far off, more come closer; never a jump."""
    n, q = 50_000, 3
    rank = Rank(_core.Plan(codec, "none", n, "float32", {"density": 0.001, "Q": q}))
    used = []
    for step in range(8 * q):
        x = np.random.default_rng(step).standard_t(3, n).astype(np.float32)
        rank.encode(Vector(x), Step(step=step))
        used.append(rank.stats.stages)
    assert used[0] == 1
    moves = np.diff(used)
    assert (np.abs(moves) <= 1).all() and not moves[np.arange(len(moves)) % q != q - 1].any()


def test_the_printed_rule_is_stuck_where_a_turning_one_is_not() -> None:
    """Gamma of shape .4: one exponential stage lets 13 times k pass, and Algorithm 1 takes stages away."""
    n, found = 100_000, {}
    for adapt in ("printed", "turning"):
        settings = {"density": 0.001, "adapt": adapt}
        rank = Rank(_core.Plan("sidco-e", "none", n, "float32", settings))
        ratio, used = [], set()
        for step in range(60):
            rng = np.random.default_rng(step)
            x = (rng.gamma(0.4, 1, n) * rng.choice([-1, 1], n)).astype(np.float32)
            rank.encode(Vector(x), Step(step=step))
            ratio.append(rank.stats.found / (0.001 * n))
            used.add(rank.stats.stages)
        found[adapt] = float(np.median(ratio[20:]))
        assert used == {1} if adapt == "printed" else len(used) > 2
    assert found["printed"] > 10 and 0.5 < found["turning"] < 2, found


@pytest.mark.parametrize("codec", ["sidco-gp", "sidco-p"])
@pytest.mark.slow
def test_large_groups_read_once(codec: str) -> None:
    """Where probes stand in for candidates: their moments are good enough to go without a second pass."""
    n = 6_000_000
    rank = Rank(_core.Plan(codec, "none", n, "float32", {"density": 0.001}))
    passes = []
    for step in range(24):
        x = np.random.default_rng(step % 3).laplace(0, 1, n).astype(np.float32)
        rank.encode(Vector(x), Step(step=step))
        passes.append(rank.stats.passes)
    assert sum(passes[14:]) <= 12, passes


@pytest.mark.parametrize("n", [1_500_000, 2_600_000])
@pytest.mark.parametrize(
    "codec, settings, most",
    [
        ("sidco-e", {"density": 0.01}, 22),
        ("sidco-p", {"density": 0.01}, 22),
        ("sidco-e", {"density": 0.1, "adapt": "printed"}, 27),
        ("sidco-e", {"density": 0.1}, 30),
    ],
)
def test_beside_a_full_residual_it_reads_once(
    codec: str, settings: dict[str, Any], most: int, n: int
) -> None:
    """A residual of many steps: more lies beyond the first stages than their ratios say, so that candidates
    picked by the ratios did not fit, and probes were too far apart for what was left: two passes a step. At
    10 % the number of stages goes up and down, and the thresholds with it, by some percent at every step."""
    rng = np.random.default_rng(0)
    gradients = [rng.laplace(size=n).astype(np.float32) for _ in range(3)]
    rank = Rank(_core.Plan(codec, "residual", n, "float32", settings))
    start = (20 * rng.laplace(size=n)).astype(np.float32)
    rank.plan.residual_in(rank.state.ptr, start.ctypes.data)
    passes = []
    for step in range(60):
        rank.encode(Vector(gradients[step % 3]), Step(step=step))
        passes.append(rank.stats.passes)
    assert sum(passes[40:]) <= most, passes


# ---- the baseline --------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_normal_vector_needs_no_correction(density: float, rounds: int) -> None:
    n = 100_000
    x = spaced(lambda p: special.ndtri((1 + p) / 2), n)
    rank, head = encode("gaussiank", x, density=density, rounds=rounds)
    assert rank.stats.found == pytest.approx(density * n, rel=0.01)
    assert head["scale"] == pytest.approx(-special.ndtri(density / 2), rel=1e-3)


def test_the_corrections_by_hand() -> None:
    """Laplace at 1 %: the fit passes 2.6 %; times 1.5: .42 %, times .75: 6.5 %, times 1.125: 1.7 %."""
    n = 100_000
    x = spaced(lambda p: -np.log1p(-p), n)
    fitted = math.sqrt(2) * -float(special.ndtri(0.005))
    for rounds, factor in ((1, 1), (2, 1.5), (3, 0.75), (4, 1.125)):
        rank, head = encode("gaussiank", x, density=0.01, rounds=rounds, capacity=20)
        assert head["scale"] == pytest.approx(factor * fitted, rel=1e-3)
        assert rank.stats.found == pytest.approx(n * math.exp(-factor * fitted), rel=0.02)
    assert encode("gaussiank", x, density=0.001, rounds=9)[1]["scale"] == pytest.approx(
        1.5 * math.sqrt(2) * -float(special.ndtri(0.0005)), rel=1e-3
    )


def test_a_mean_far_from_zero_shifts_the_threshold() -> None:
    x = np.random.default_rng(0).normal(5, 1, 50_000).astype(np.float32)
    rank, head = encode("gaussiank", x, density=0.01, rounds=1)
    assert head["scale"] == pytest.approx(5 - float(special.ndtri(0.005)), rel=1e-2)
    assert rank.stats.found == pytest.approx(250, rel=0.2)  # one side only: half of k
    assert encode("gaussiank", -x, density=0.01, rounds=1)[0].stats.found == 50_000  # below 0, so 0


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_large_groups_of_gaussiank(density: float) -> None:
    n = 3_000_000
    rank = Rank(_core.Plan("gaussiank", "none", n, "float32", {"density": density}))
    passes = []
    for step in range(12):
        x = np.random.default_rng(step % 3).laplace(0, 1, n).astype(np.float32)
        rank.encode(Vector(x), Step(step=step))
        passes.append(rank.stats.passes)
    assert sum(passes[6:]) <= 8, passes
