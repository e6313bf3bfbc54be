"""The translation of PTX (ptx/translate.py): every instruction against a rule from the PTX ISA manual."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from ptx.build import HERE, OUT, compiled, some_of
from ptx.translate import RULES, Instruction, host_name, translate
from test_emulated import pytestmark  # noqa: F401

LANES = 1024
REGISTER = {1: ("pred", "p"), 8: ("b16", "rs"), 16: ("b16", "rs"), 32: ("b32", "r"), 64: ("b64", "rd")}
NAN32, NAN64 = 0x7FFFFFFF, 0x7FF8000000000000


def width(type_: str) -> int:
    return 1 if type_ == "pred" else int(re.sub(r"\D", "", type_))


def wrapped(x: int, type_: str) -> int:
    """A whole number as the type's bits."""
    return x & ((1 << width(type_)) - 1)


def number(word: int, type_: str) -> Any:
    """Bits as a number of a type: int, or numpy's float."""
    if type_ == "f32":
        return np.uint32(word).view(np.float32)
    if type_ == "f64":
        return np.uint64(word).view(np.float64)
    return word - (1 << width(type_)) if type_[0] == "s" and word >> (width(type_) - 1) else word


def word_of(x: Any, type_: str) -> int:
    """A rule's result as bits. Single precision knows one NaN."""
    if type_ == "f32":
        return NAN32 if np.isnan(x) else int(np.float32(x).view(np.uint32))
    if type_ == "f64":
        return int(np.float64(x).view(np.uint64))
    return wrapped(int(x), type_)


class Form:
    """An instruction with %d, %a, %b, %c for its operands, their types, and what it should give."""

    def __init__(self, text: str, types: str, rule: Callable[..., Any]) -> None:
        self.text, self.rule = text, rule
        self.to, *self.of = types.split()
        self.name = "t" + re.sub(r"\W+", "_", text)

    def __repr__(self) -> str:
        return self.text.split(" ")[0]

    def ptx(self) -> str:
        names = dict(zip("abc", self.of, strict=False))
        lines = [
            f".visible .entry {self.name}(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd)",
            "{",
        ]
        lines += [".reg .b64 %rd<32>;", ".reg .b32 %r<32>;", ".reg .b16 %rs<32>;", ".reg .pred %p<32>;"]
        lines += ["mov.u32 %r0, %tid.x;", "mul.wide.u32 %rd0, %r0, 8;"]
        text = self.text
        for i, (letter, type_) in enumerate([*names.items(), ("d", self.to)], 1):
            lines += [f"ld.param.u64 %rd{i}, [p{letter}];", f"add.s64 %rd{i}, %rd{i}, %rd0;"]
            kind = REGISTER[width(type_)][1]
            text = re.sub(f"%{letter}\\b", f"%{kind}{10 + i}", text)
            if letter != "d":
                load = "u8" if type_ == "pred" else f"u{width(type_)}"
                lines.append(f"ld.global.{load} %{'rs' if type_ == 'pred' else kind}{10 + i}, [%rd{i}];")
                if type_ == "pred":
                    lines.append(f"setp.ne.u16 %p{10 + i}, %rs{10 + i}, 0;")
        last = len(names) + 1
        lines.append(text + ";")
        if self.to == "pred":
            lines += [f"selp.u32 %r30, 1, 0, %p{10 + last};", f"st.global.u32 [%rd{last}], %r30;"]
        else:
            kind = REGISTER[width(self.to)][1]
            lines.append(f"st.global.u{width(self.to)} [%rd{last}], %{kind}{10 + last};")
        return "\n".join([*lines, "ret;", "}", ""])


def shifted(x: int, by: int, type_: str, left: bool) -> int:
    if left:
        return x << by if by < width(type_) else 0
    return x >> min(by, 64)


def divided(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(x: int, at: int, length: int, type_: str) -> int:
    """bfe: bits beyond the word are the sign, or 0; a field of no bits is 0."""
    at, length = at & 255, length & 255
    if not length:
        return 0
    top = min(at + length - 1, width(type_) - 1)
    sign = (x >> top & 1) if type_[0] == "s" else 0
    bits = [(x >> (at + i) & 1) if at + i < width(type_) else sign for i in range(min(length, width(type_)))]
    return sum(b << i for i, b in enumerate(bits)) + sum(sign << i for i in range(length, width(type_)))


def inserted(a: int, b: int, at: int, length: int, n: int) -> int:
    for i in range(length & 255):
        if (at & 255) + i < n:
            b = (b & ~(1 << ((at & 255) + i))) | (a >> i & 1) << ((at & 255) + i)
    return b


def permuted(a: int, b: int, how: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        which = how >> 4 * i & 15
        byte = source[which & 7]
        out.append((0xFF if byte >> 7 else 0) if which & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def least(a: Any, b: Any, greatest: bool = False) -> Any:
    if np.isnan(a) or np.isnan(b):
        return b if np.isnan(a) else a
    if a == b:
        return a if np.signbit(a) != greatest else b
    return max(a, b) if greatest else min(a, b)


def to_integer(x: Any, how: str, of: str, to: str) -> int:
    if np.isnan(x):
        return 1 << (width(to) - 1) if 64 in (width(of), width(to)) else 0
    low, high = (
        (-(1 << (width(to) - 1)), (1 << (width(to) - 1)) - 1) if to[0] == "s" else (0, (1 << width(to)) - 1)
    )
    if np.isinf(x):
        return high if x > 0 else low
    whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[how](float(x))
    return max(low, min(high, whole))


def rounded(x: Any, how: str) -> Any:
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[how](x)


def half(word: int) -> Any:
    return np.uint16(word).view(np.float16)


def to_half(x: Any) -> int:
    return 0x7FFF if np.isnan(x) else int(np.float16(x).view(np.uint16))


def to_bfloat(x: Any) -> int:
    word = int(np.float32(x).view(np.uint32))
    return 0x7FFF if np.isnan(x) else (word + 0x7FFF + (word >> 16 & 1)) >> 16


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def forms() -> list[Form]:
    out: list[Form] = []

    def add(text: str, types: str, rule: Callable[..., Any]) -> None:
        out.append(Form(text, types, rule))

    for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
        n = width(t)
        add(f"add.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a + b)
        add(f"sub.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a - b)
        add(f"mul.lo.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a * b)
        add(f"mul.hi.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b, n=n: a * b >> n)
        add(f"mad.lo.{t} %d, %a, %b, %c", f"{t} {t} {t} {t}", lambda a, b, c: a * b + c)
        add(f"mad.hi.{t} %d, %a, %b, %c", f"{t} {t} {t} {t}", lambda a, b, c, n=n: (a * b >> n) + c)
        if width(t) < 64:
            wide = f"{t[0]}{2 * width(t)}"
            add(f"mul.wide.{t} %d, %a, %b", f"{wide} {t} {t}", lambda a, b: a * b)
            add(f"mad.wide.{t} %d, %a, %b, %c", f"{wide} {t} {t} {wide}", lambda a, b, c: a * b + c)
        add(f"div.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: divided(a, b) if b else None)
        add(f"rem.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a - divided(a, b) * b if b else None)
        add(f"min.{t} %d, %a, %b", f"{t} {t} {t}", min)
        add(f"max.{t} %d, %a, %b", f"{t} {t} {t}", max)
        for how, compare in COMPARISONS.items():
            add(f"setp.{how}.{t} %d, %a, %b", f"pred {t} {t}", compare)
    for how, compare in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        add(f"setp.{how}.u32 %d, %a, %b", "pred u32 u32", COMPARISONS[compare])
    for t in ("s16", "s32", "s64"):
        add(f"neg.{t} %d, %a", f"{t} {t}", lambda a: -a)
        add(f"abs.{t} %d, %a", f"{t} {t}", abs)
    for t in ("b16", "b32", "b64"):
        add(f"and.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a & b)
        add(f"or.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a | b)
        add(f"xor.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a ^ b)
        add(f"not.{t} %d, %a", f"{t} {t}", lambda a: ~a)
        add(f"shl.{t} %d, %a, %b", f"{t} {t} u32", lambda a, b, t=t: shifted(a, b, t, True))
        add(f"selp.{t} %d, %a, %b, %c", f"{t} {t} {t} pred", lambda a, b, c: a if c else b)
        add(f"mov.{t} %d, %a", f"{t} {t}", lambda a: a)
    for t in ("u16", "u32", "u64", "s16", "s32", "s64"):
        add(f"shr.{t} %d, %a, %b", f"{t} {t} u32", lambda a, b, t=t: shifted(a, b, t, False))
    add("and.pred %d, %a, %b", "pred pred pred", lambda a, b: a and b)
    add("or.pred %d, %a, %b", "pred pred pred", lambda a, b: a or b)
    add("xor.pred %d, %a, %b", "pred pred pred", lambda a, b: bool(a) != bool(b))
    add("not.pred %d, %a", "pred pred", lambda a: not a)
    for t in ("b32", "b64"):
        n = width(t)
        add(f"popc.{t} %d, %a", f"u32 {t}", lambda a: bin(a).count("1"))
        add(f"clz.{t} %d, %a", f"u32 {t}", lambda a, n=n: n - a.bit_length())
        add(f"brev.{t} %d, %a", f"{t} {t}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
        add(f"bfi.{t} %d, %a, %b, %c, 9", f"{t} {t} {t} u32", lambda a, b, c, n=n: inserted(a, b, c, 9, n))
        add(f"bfi.{t} %d, %a, %b, 5, %c", f"{t} {t} {t} u32", lambda a, b, c, n=n: inserted(a, b, 5, c, n))
    for t in ("u32", "s32", "u64", "s64"):
        n = width(t)
        add(f"bfe.{t} %d, %a, %b, %c", f"{t} {t} u32 u32", lambda a, b, c, t=t: field(a, b, c, t))
        add(f"bfind.{t} %d, %a", f"u32 {t}", lambda a: (a if a >= 0 else ~a).bit_length() - 1)
        add(
            f"bfind.shiftamt.{t} %d, %a",
            f"u32 {t}",
            lambda a, n=n: n - (a if a >= 0 else ~a).bit_length() if a not in (0, -1) else -1,
        )
    add("prmt.b32 %d, %a, %b, %c", "b32 b32 b32 b32", lambda a, b, c: permuted(a, b, c))
    add("shf.l.wrap.b32 %d, %a, %b, %c", "b32 b32 b32 u32", lambda a, b, c: (b << 32 | a) << (c & 31) >> 32)
    add("shf.r.wrap.b32 %d, %a, %b, %c", "b32 b32 b32 u32", lambda a, b, c: (b << 32 | a) >> (c & 31))
    add(
        "shf.l.clamp.b32 %d, %a, %b, %c", "b32 b32 b32 u32", lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32
    )
    add("shf.r.clamp.b32 %d, %a, %b, %c", "b32 b32 b32 u32", lambda a, b, c: (b << 32 | a) >> min(c, 32))
    add("lop3.b32 %d, %a, %b, %c, 0xE8", "b32 b32 b32 b32", lambda a, b, c: a & b | a & c | b & c)
    add("lop3.b32 %d, %a, %b, %c, 0x96", "b32 b32 b32 b32", lambda a, b, c: a ^ b ^ c)
    for t in ("f32", "f64"):
        n = width(t)
        add(f"add.rn.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a + b)
        add(f"sub.rn.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a - b)
        add(f"mul.rn.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a * b)
        add(f"div.rn.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: a / b)
        add(f"rcp.rn.{t} %d, %a", f"{t} {t}", lambda a: type(a)(1) / a)
        add(f"sqrt.rn.{t} %d, %a", f"{t} {t}", np.sqrt)
        add(f"neg.{t} %d, %a", f"b{width(t)} b{width(t)}", lambda a, n=n: a ^ 1 << (n - 1))
        add(f"abs.{t} %d, %a", f"b{width(t)} b{width(t)}", lambda a, n=n: a & ~(1 << (n - 1)))
        add(f"min.{t} %d, %a, %b", f"{t} {t} {t}", least)
        add(f"max.{t} %d, %a, %b", f"{t} {t} {t}", lambda a, b: least(a, b, True))
        add(f"setp.nan.{t} %d, %a, %b", f"pred {t} {t}", lambda a, b: np.isnan(a) or np.isnan(b))
        add(f"setp.num.{t} %d, %a, %b", f"pred {t} {t}", lambda a, b: not (np.isnan(a) or np.isnan(b)))
        for how, compare in COMPARISONS.items():
            add(
                f"setp.{how}.{t} %d, %a, %b",
                f"pred {t} {t}",
                lambda a, b, compare=compare: not (np.isnan(a) or np.isnan(b)) and compare(a, b),
            )
            add(
                f"setp.{how}u.{t} %d, %a, %b",
                f"pred {t} {t}",
                lambda a, b, compare=compare: np.isnan(a) or np.isnan(b) or compare(a, b),
            )
        for how in ("rni", "rzi", "rmi", "rpi"):
            add(f"cvt.{how}.{t}.{t} %d, %a", f"{t} {t}", lambda a, how=how: rounded(a, how))
            for to in ("s16", "u16", "s32", "u32", "s64", "u64"):
                add(
                    f"cvt.{how}.{to}.{t} %d, %a",
                    f"{to} {t}",
                    lambda a, how=how, t=t, to=to: to_integer(a, how, t, to),
                )
        for of in ("s16", "u16", "s32", "u32", "s64", "u64"):
            add(f"cvt.rn.{t}.{of} %d, %a", f"{t} {of}", {"f32": np.float32, "f64": np.float64}[t])
    add("fma.rn.f32 %d, %a, %b, %c", "f32 f32 f32 f32", fused)
    for how in ("and", "or", "xor"):
        add(
            f"setp.lt.{how}.s32 %d, %a, %b, %c",
            "pred s32 s32 pred",
            lambda a, b, c, how=how: {"and": (a < b) & c, "or": (a < b) | c, "xor": (a < b) ^ c}[how],
        )
    add("cvt.f64.f32 %d, %a", "f64 f32", lambda a: np.float64(a))
    add("cvt.rn.f32.f64 %d, %a", "f32 f64", lambda a: np.float32(a))
    add("cvt.rn.f16.f32 %d, %a", "b16 f32", to_half)
    add("cvt.rn.bf16.f32 %d, %a", "b16 f32", to_bfloat)
    add("cvt.rn.f16x2.f32 %d, %a, %b", "b32 f32 f32", lambda a, b: to_half(a) << 16 | to_half(b))
    add("cvt.rn.bf16x2.f32 %d, %a, %b", "b32 f32 f32", lambda a, b: to_bfloat(a) << 16 | to_bfloat(b))
    add("cvt.f32.f16 %d, %a", "f32 b16", lambda a: np.float32(half(a)))
    add("cvt.f32.bf16 %d, %a", "f32 b16", lambda a: number(a << 16, "f32"))
    kinds = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
    for of in kinds:
        for to in kinds:
            if width(of) > 8 and width(to) > 8:
                add(f"cvt.{to}.{of} %d, %a", f"{to} {of}", lambda a: a)
                low, high = number(1 << (width(to) - 1), to) if to[0] == "s" else 0, None
                high = (1 << (width(to) - (to[0] == "s"))) - 1
                add(
                    f"cvt.sat.{to}.{of} %d, %a",
                    f"{to} {of}",
                    lambda a, low=low, high=high: max(low, min(high, a)),
                )
    add("cvt.s32.s8 %d, %a", "s32 b16", lambda a: number(a & 255, "s8"))
    add("cvt.u32.u8 %d, %a", "u32 b16", lambda a: a & 255)
    add("cvt.s16.s8 %d, %a", "s16 b16", lambda a: number(a & 255, "s8"))
    return out


def fused(a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once: exactly in fractions, which numpy's float of 64 bits would round twice."""
    if not all(np.isfinite(x) for x in (a, b, c)):
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))  # the sign of a zero
    near = np.float32(float(exact))
    if not np.isfinite(near):
        return (
            near
            if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103
            else np.float32(np.sign(near) * 3.4028235e38)
        )
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    around = [x for x in around if np.isfinite(x)]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


FORMS = forms()


def inputs(type_: str, rng: np.random.Generator) -> list[int]:
    """Words of a type: its edges, and any."""
    n = width(type_)
    if type_ == "pred":
        return [int(x) for x in rng.integers(0, 2, LANES)]
    edges = [
        0,
        1,
        2,
        31,
        32,
        33,
        63,
        64,
        255,
        (1 << n) - 1,
        (1 << (n - 1)) - 1,
        1 << (n - 1),
        (1 << (n - 1)) + 1,
    ]
    any_words = [
        int(x)
        for x in rng.integers(0, 1 << 63, LANES, dtype=np.uint64) * 2
        + rng.integers(0, 2, LANES, dtype=np.uint64)
    ]
    if type_ in ("f32", "f64"):
        kind = np.float32 if type_ == "f32" else np.float64
        some = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 65504.0, 65520.0, 2.0**31, -(2.0**31),
                2.0**63, 2.0**32 - 1, 1e-40, 5.9e-8,
                np.inf, -np.inf, np.finfo(kind).max, np.finfo(kind).tiny]  # fmt: skip
        edges = [word_of(x, type_) for x in some] + [NAN32 if type_ == "f32" else NAN64]
        near_one = [word_of(kind(x), type_) for x in rng.normal(0, 3, LANES)]
        any_words = [near_one[i] if i % 2 else x & ((1 << n) - 1) for i, x in enumerate(any_words)]
        any_words = [x if not np.isnan(number(x, type_)) else edges[-1] for x in any_words]
    return [
        edges[int(rng.integers(len(edges)))] if rng.integers(2) else x & ((1 << n) - 1) for x in any_words
    ]


@cache
def instructions() -> ctypes.CDLL:
    text = "\n".join(f.ptx() for f in FORMS) + MEETINGS
    source, module = translate(text)
    assert not module.refused, module.refused
    runs = [str(HERE / name) for name in ("ptx/run.cpp", "emulate.cpp", "order.cpp")]
    return ctypes.CDLL(str(compiled(source, OUT / "instructions.so", runs)))


def launch(name: str, arguments: list[Any], blocks: int = 1, threads: int = LANES, dynamic: int = 0,
           together: bool = False) -> None:  # fmt: skip
    library = instructions()
    packed = struct.pack(f"<{len(arguments)}Q", *(a.ctypes.data for a in arguments))
    library.ptx_run(
        getattr(library, "k_" + name), packed, ctypes.c_uint64(len(packed)), blocks, threads,
        ctypes.c_uint64(dynamic), int(together),
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_instruction_does_what_the_manual_says(form: Form) -> None:
    rng = np.random.default_rng(len(form.text))
    words = [np.array(inputs(t, rng), np.uint64) for t in form.of]
    result = np.zeros(LANES, np.uint64)
    launch(form.name, [*words, *[result] * (3 - len(words)), result])
    for lane, got in enumerate(result):
        given = [number(int(w[lane]), t) for w, t in zip(words, form.of, strict=True)]
        with np.errstate(all="ignore"):
            want = form.rule(*given)
        if want is None:  # the manual leaves it open
            continue
        if form.to == "f64" and np.isnan(want):
            assert np.isnan(number(int(got), "f64")), (form.text, given)
            continue
        assert int(got) == word_of(want, form.to), (form.text, given, hex(int(got)), want)


MEETINGS = """
.global .align 4 .b32 table[3] = {5, 0f3F800000, 7};
.const .align 8 .b8 bytes[4] = {1, 2, 3, 4};
.shared .align 16 .b8 fixed[256];
.extern .shared .align 16 .b8 dynamic[];
.func (.param .b32 result) twice(.param .b32 x, .param .b64 y)
{
	.reg .b32 %r<4>;
	ld.param.u32 %r1, [x];
	ld.param.u32 %r3, [y+4];
	add.s32 %r2, %r1, %r1;
	add.s32 %r2, %r2, %r3;
	st.param.b32 [result], %r2;
	ret;
}
.visible .entry meetings(.param .u64 out)
{
	.reg .b32 %r<40>;
	.reg .b64 %rd<10>;
	.reg .b16 %rs<8>;
	.reg .pred %p<8>;
	.local .align 8 .b8 own[16];
	mov.u32 %r0, %tid.x;
	mov.u32 %r30, %ctaid.x;
	mov.u32 %r31, %ntid.x;
	mad.lo.s32 %r32, %r30, %r31, %r0;
	ld.param.u64 %rd0, [out];
	mul.wide.u32 %rd1, %r32, 96;
	add.s64 %rd1, %rd0, %rd1;
	shfl.sync.bfly.b32 %r1|%p1, %r0, 5, 31, -1;
	st.global.u32 [%rd1], %r1;
	shfl.sync.up.b32 %r2|%p2, %r0, 3, 0, -1;
	selp.u32 %r3, %r2, 1000, %p2;
	st.global.u32 [%rd1+4], %r3;
	shfl.sync.idx.b32 %r4, %r0, 7, 31, -1;
	st.global.u32 [%rd1+8], %r4;
	and.b32 %r5, %r0, 3;
	setp.eq.s32 %p3, %r5, 1;
	vote.sync.ballot.b32 %r6, %p3, -1;
	vote.sync.any.pred %p4, %p3, -1;
	vote.sync.all.pred %p5, %p3, -1;
	selp.u32 %r7, 1, 0, %p4;
	selp.u32 %r8, 1, 0, %p5;
	st.global.v4.u32 [%rd1+16], {%r6, %r7, %r8, %r5};
	redux.sync.max.u32 %r9, %r0, -1;
	redux.sync.add.s32 %r10, %r0, -1;
	st.global.v2.u32 [%rd1+32], {%r9, %r10};
	shl.b32 %r11, %r0, 2;
	st.shared.u32 [%r11], %r0;
	mov.u32 %r12, fixed;
	setp.gt.u32 %p6, %r0, 63;
	@%p6 bra $L_far;
	add.s32 %r13, %r12, %r11;
	st.shared.u32 [%r13], %r11;
$L_far:
	bar.sync 0;
	ld.shared.u32 %r14, [dynamic+8];
	ld.shared.v2.u32 {%r15, %r16}, [fixed+8];
	st.global.u32 [%rd1+40], %r14;
	st.global.u32 [%rd1+44], %r16;
	bar.red.or.pred %p7, 0, %p3;
	selp.u32 %r17, 1, 0, %p7;
	bar.red.popc.u32 %r18, 0, %p3;
	st.global.v2.u32 [%rd1+48], {%r17, %r18};
	atom.shared.add.u32 %r19, [dynamic+4], 1;
	bar.sync 0;
	ld.shared.u32 %r20, [dynamic+4];
	st.global.u32 [%rd1+56], %r20;
	mov.b32 {%rs1, %rs2}, %r0;
	mov.b32 %r21, {%rs2, %rs1};
	st.global.u32 [%rd1+60], %r21;
	st.local.u64 [own+8], %rd1;
	ld.local.u64 %rd2, [own+8];
	mov.u64 %rd3, table;
	ld.global.u32 %r22, [%rd3+4];
	st.global.u32 [%rd2+64], %r22;
	ld.const.u8 %rs3, [bytes+2];
	cvt.u32.u16 %r23, %rs3;
	{
	.param .b32 retval0;
	.param .b32 param0;
	.param .b64 param1;
	st.param.b32 [param0+0], %r23;
	st.param.b64 [param1+0], %rd2;
	call.uni (retval0), twice, (param0, param1);
	ld.param.b32 %r24, [retval0+0];
	}
	shr.u64 %rd4, %rd2, 32;
	cvt.u32.u64 %r25, %rd4;
	sub.s32 %r24, %r24, %r25;
	st.global.u32 [%rd1+68], %r24;
	mov.u32 %r26, %nctaid.x;
	st.global.u32 [%rd1+72], %r26;
	mov.u32 %r27, %laneid;
	mov.u32 %r28, %lanemask_lt;
	st.global.u32 [%rd1+76], %r27;
	st.global.u32 [%rd1+80], %r28;
	cvta.to.global.u64 %rd5, %rd0;
	atom.global.max.u32 %r29, [%rd5+84], %r32;
	ret;
}
.visible .entry waits(.param .u64 out)
{
	.reg .b32 %r<10>;
	.reg .b64 %rd<10>;
	.reg .pred %p<3>;
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %nctaid.x;
	ld.param.u64 %rd0, [out];
	mul.wide.u32 %rd1, %r1, 8;
	add.s64 %rd1, %rd0, %rd1;
	setp.ne.s32 %p0, %r0, 0;
	@%p0 bra $L_met;
	add.s32 %r3, %r1, 7;
	st.global.u32 [%rd1+8], %r3;
	fence.acq_rel.gpu;
	atom.global.add.u32 %r4, [%rd0], 1;
$L_look:
	ld.acquire.gpu.u32 %r5, [%rd0];
	setp.ge.u32 %p1, %r5, %r2;
	@%p1 bra $L_met;
	mov.u32 %r6, 32;
	nanosleep.u32 %r6;
	bra.uni $L_look;
$L_met:
	bar.sync 0;
	add.s32 %r7, %r1, 1;
	rem.u32 %r7, %r7, %r2;
	mul.wide.u32 %rd2, %r7, 8;
	add.s64 %rd2, %rd0, %rd2;
	ld.global.u32 %r8, [%rd2+8];
	@!%p0 st.global.u32 [%rd1+12], %r8;
	ret;
}
"""


def test_threads_meet_and_memory_is_where_it_is_declared() -> None:
    blocks, threads = 2, 96
    out = np.zeros((blocks * threads, 24), np.uint32)
    launch("meetings", [out], blocks, threads, dynamic=4 * threads)
    for i, row in enumerate(out):
        t, lane = i % threads, i % 32
        base = t - lane
        assert row[0] == base + (lane ^ 5)
        assert row[1] == (t - 3 if lane >= 3 else 1000)
        assert row[2] == base + 7
        assert list(row[4:8]) == [0x22222222, 1, 0, t & 3]
        assert list(row[8:10]) == [base + 31, sum(range(base, base + 32))]
        assert row[10] == 2 and row[11] == 12
        assert list(row[12:14]) == [1, threads // 4]
        assert row[14] == 1 + threads  # thread 1's own number, and one of each thread
        assert row[15] == t << 16
        assert row[16] == 0x3F800000 and row[17] == 6
        assert row[18] == blocks and row[19] == lane and row[20] == (1 << lane) - 1
    assert out[0, 21] == blocks * threads - 1


def test_a_thread_that_waits_lets_others_run() -> None:
    """ld.acquire in a loop, with a nanosleep: each block finds what the next one stored before it arrived."""
    blocks = 5
    out = np.zeros(2 * blocks + 2, np.uint32)
    launch("waits", [out], blocks, 64, together=True)
    assert out[0] == blocks
    assert list(out[2::2]) == [b + 7 for b in range(blocks)]
    assert list(out[3::2]) == [(b + 1) % blocks + 7 for b in range(blocks)]


def test_parts_of_a_module_have_each_kernel_once() -> None:
    whole = MEETINGS + ".entry plain()\n{\n\tret;\n}\n"  # as nvcc writes those of an unnamed namespace
    names = [g.name for k in range(2) for g in translate(some_of(whole, k, 2))[1].functions]
    assert sorted(names) == ["meetings", "plain", "twice", "twice", "waits"]


UNKNOWN = [
    "add.f32 %f1, %f2, %f3", "mul.ftz.rn.f32 %f1, %f2, %f3", "sub.rz.f32 %f1, %f2, %f3",
    "mad.f32 %f1, %f2, %f3, %f4",
    "fma.rz.f32 %f1, %f2, %f3, %f4", "add.sat.s32 %r1, %r2, %r3", "sad.u32 %r1, %r2, %r3, %r4", "bar.sync 1",
    "bar.sync 0, 64", "shfl.sync.down.b32 %r1, %r2, 1, 31, -1", "shfl.sync.bfly.b32 %r1, %r2, 1, 7, -1",
    "cvt.rz.f16.f32 %h1, %f1", "cvt.rni.ftz.f32.f32 %f1, %f2", "ex2.approx.f32 %f1, %f2",
    "div.approx.f32 %f1, %f2, %f3",
    "ld.global.v8.f32 %f1, [%rd1]", "cp.async.ca.shared.global [%r1], [%rd1], 16",
    "atom.global.add.f32 %f1, [%rd1], %f2",
    "mov.u32 %r1, %smid", "vote.sync.uni.pred %p1, %p2, -1", "call.uni (retval0), nowhere, (param0)",
    "setp.xyz.s32 %p1, %r1, %r2",
]  # fmt: skip


@pytest.mark.parametrize("text", UNKNOWN, ids=lambda t: t.split(" ")[0])
def test_what_is_not_known_is_refused_by_name(text: str) -> None:
    registers = "".join(
        f".reg .{t} %{r}<5>;\n"
        for t, r in (("b32", "r"), ("b64", "rd"), ("f32", "f"), ("b16", "h"), ("pred", "p"))
    )
    _, module = translate(f".visible .entry e()\n{{\n{registers}{text};\nret;\n}}\n")
    (said,) = module.refused
    assert text in said


def test_every_instruction_has_a_form() -> None:
    """A rule that no form or kernel above reaches is one that nobody has checked."""
    reached = {Instruction.parse(f.text).name for f in FORMS}
    reached |= {Instruction.parse(s).name for s in re.findall(r"^\t(?:@%\w+ )?([a-z][^;]*);", MEETINGS, re.M)}
    same = {"exit", "red", "barrier"}  # as ret, atom and bar
    without_a_value = {"prefetch", "prefetchu", "griddepcontrol", "discard", "membar", "trap"}
    assert set(RULES) - reached == same | without_a_value


def test_names_are_those_of_the_host_compiler() -> None:
    of_nvcc = "_ZN41_GLOBAL__N__396a09ba_9_linear_cu_ada06c1517sid_decode_kernelI11sid_memory0EEvS0_"
    assert host_name(of_nvcc) == "_ZN12_GLOBAL__N_117sid_decode_kernelI11sid_memory0EEvS0_"
