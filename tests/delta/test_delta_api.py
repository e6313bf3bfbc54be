"""encode and apply: dtypes and shapes, other bases, shared memory, strides; and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import sidcomp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sidcomp import delta
from sidcomp.delta.message import DTYPES
from sidcomp.errors import DeltaError
from test_delta_message import bits, copied, same, some_weights

PRESENT = [name for name in DTYPES if hasattr(torch, name)]
Tensor = torch.Tensor


def equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype is y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def random_bits(dtype: torch.dtype, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (n * size,), generator=g, dtype=torch.uint8).view(dtype)


def changed(x: Tensor, share: float, seed: int) -> Tensor:
    """A share of the elements gets other bits."""
    g = torch.Generator().manual_seed(seed + 1)
    y, size = bits(x).clone(), x.element_size()
    chosen = torch.rand(x.numel(), generator=g) < share
    more = torch.randint(1, 3, (x.numel(),), generator=g, dtype=torch.uint8)
    low = y.view(-1, size)[:, 0]
    low[chosen] = low[chosen] ^ (1 if x.dtype is torch.bool else more[chosen])
    return y.view(x.dtype).view(x.shape)


def round_trip(old: Tensor, new: Tensor, threads: int | None = None) -> bytearray:
    was, message = old.clone(), delta.encode(old, new, threads=threads)
    out = torch.empty_like(old)
    assert delta.apply(old, message, out=out) is out and equal(out, new) and equal(old, was)
    assert delta.apply(old, message, threads=threads) is old and equal(old, new)
    return message


@pytest.mark.parametrize("name", PRESENT)
def test_all_dtypes_and_sizes(name: str) -> None:
    dtype = getattr(torch, name)
    for n in (0, 1, 2, 7, 64, 1001, 20_011):
        for share in (0, 0.01, 0.3, 1):
            old = random_bits(dtype, n, n)
            round_trip(old, changed(old, share, n))
        round_trip(random_bits(dtype, n, 1), random_bits(dtype, n, 2))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PRESENT),
    st.integers(0, 5000),
    st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_random_weights(name: str, n: int, share: float, seed: int) -> None:
    old = random_bits(getattr(torch, name), n, seed)
    round_trip(old, changed(old, share, seed))


@pytest.mark.parametrize("n", [2**22 - 1, 2**22, 2**22 + 1, 2**23 + 3])
def test_the_borders_of_blocks(n: int) -> None:
    """Changes at both sides of them, on several threads, by the same bytes."""
    old = torch.arange(n, dtype=torch.int32).to(torch.bfloat16)
    new = old.clone()
    places = [p for p in (0, 2**22 - 2, 2**22 - 1, 2**22, n - 1) if p < n]
    new.view(torch.int16)[places] += 1
    assert round_trip(old.clone(), new, threads=1) == round_trip(old, new, threads=3)


def test_nan_payloads_and_zeros_keep_their_bits() -> None:
    for dtype, ints, numbers in (
        (torch.float32, torch.int32, [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -(2**31), 0]),
        (torch.bfloat16, torch.int16, [0x7F81, 0x7FC0, 0x7FFF, -1, -(2**15), 0]),
        (torch.float16, torch.int16, [0x7C01, 0x7E00, 0x7FFF, -1, -(2**15), 0]),
    ):
        values = torch.tensor(numbers, dtype=ints)
        old = values.repeat(6).repeat(50)
        new = values.repeat_interleave(6).repeat(50)
        round_trip(old.view(dtype), new.view(dtype))
    zero = torch.zeros(100)
    message = round_trip(zero.clone(), -zero)  # equal as numbers, not as bits
    assert len(message) > 128


def test_nothing_changed_is_said_in_a_few_bytes() -> None:
    old, _ = some_weights()
    message = delta.encode(old, copied(old))
    assert len(message) < 400
    assert same(delta.apply(copied(old), message), old)  # type: ignore[arg-type]


# ---- other weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_another_base_is_refused(share: float) -> None:
    """One bit anywhere, in elements that change and in those that stay."""
    old = random_bits(torch.bfloat16, 5000, 3)
    new = changed(old, share, 4)
    message = delta.encode({"w": old}, {"w": new})
    for place in range(0, 5000, 71):
        other = old.clone()
        other.view(torch.int16)[place] ^= 1 << place % 15
        before = other.clone()
        with pytest.raises(DeltaError, match="other weights than these, or is damaged, at w"):
            delta.apply({"w": other}, message)
        assert equal(other, before)
    with pytest.raises(DeltaError, match="other weights"):
        delta.apply({"w": new}, message)  # twice


def test_one_wrong_tensor_of_many_leaves_all_as_they_were() -> None:
    old, new = some_weights()
    message = delta.encode(old, new)
    there = copied(old)
    there["a"].view(torch.int16)[29, 10] ^= 1
    before = copied(there)
    with pytest.raises(DeltaError, match="at a"):
        delta.apply(there, message)
    assert same(there, before)


# ---- names ---------------------------------------------------------------------------------------------


def test_names_shapes_and_dtypes_must_be_the_same() -> None:
    old, new = some_weights()
    message = delta.encode(old, new)
    less = {name: x for name, x in old.items() if name != "a"}
    renamed = {("A" if name == "a" else name): x for name, x in old.items()}
    for wrong, text in (
        (less, "lacks a"),
        ({**old, "more": torch.zeros(1)}, "the message lacks more"),
        (renamed, "lacks a; the message lacks A"),
        ({**old, "a": old["a"].half()}, r"a is float16 \[30, 11\], but bfloat16"),
        ({**old, "a": old["a"].t()}, r"a is bfloat16 \[11, 30\]"),
    ):
        before = copied(wrong)
        with pytest.raises(DeltaError, match=text):
            delta.apply(wrong, message)
        assert same(wrong, before)
    for wrong, text in ((less, "old lacks a"), (renamed, "new lacks A; old lacks a")):
        with pytest.raises(DeltaError, match=text):
            delta.encode(wrong, new)
    with pytest.raises(DeltaError, match=r"a is float16"):
        delta.encode({**old, "a": old["a"].half()}, new)
    reverse = dict(reversed(list(copied(old).items())))
    assert same(dict(reversed(list(delta.apply(reverse, message).items()))), new)  # type: ignore[union-attr]


def test_an_empty_mapping_does_not_mean_that_nothing_changed() -> None:
    old, new = some_weights()
    with pytest.raises(DeltaError, match="no tensors"):
        delta.encode({}, {})
    with pytest.raises(DeltaError, match="no tensors"):
        delta.encode(old, {})
    with pytest.raises(DeltaError, match="no tensors"):
        delta.apply({}, delta.encode(old, new))
    with pytest.raises(DeltaError, match="no tensors"):
        delta.Sender({})


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({1: torch.zeros(1)}, "no name"),
        ({"x": 3.0}, "float, no tensor"),
        ({"x": torch.zeros(3).to_sparse()}, "x has no dense memory"),
        ({"x": torch.zeros(3, device="meta")}, "x has no dense memory"),
        ({"x": torch.zeros(1).expand(4)}, "elements of x share memory"),
        ({"x": torch.zeros(5).as_strided((3, 3), (1, 1))}, "elements of x share memory"),
        ([torch.zeros(3)], "list"),
        ({"x": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)}, "does not know"),
    ],
)
def test_what_cannot_be_sent_is_named(wrong: Any, text: str) -> None:
    with pytest.raises(DeltaError, match=text):
        delta.encode(wrong, wrong)


def test_threads_are_a_number_from_one_on() -> None:
    x = torch.zeros(3)
    for threads in (0, -1, 1.5, "two"):
        with pytest.raises(sidcomp.ArgumentError, match="threads="):
            delta.encode(x, x, threads=threads)  # type: ignore[arg-type]


# ---- memory --------------------------------------------------------------------------------------------


def test_strided_tensors_are_changed_where_they_are() -> None:
    """Transposed, sliced, and channels-last parameters, on either side."""
    g = torch.Generator().manual_seed(3)
    whole = torch.randn(8, 40, generator=g)
    image = torch.randn(2, 3, 5, 7, generator=g).to(memory_format=torch.channels_last)
    old = {"t": whole.t(), "image": image}
    new = {name: changed(x, 0.2, 5) for name, x in old.items()}
    message = delta.encode(old, new)
    assert message == delta.encode({n: x.contiguous() for n, x in old.items()}, new)
    delta.apply(old, message)
    assert all(equal(old[name], new[name]) for name in old)
    assert equal(whole, new["t"].t()) and not old["t"].is_contiguous()

    both = torch.randn(10, 12, generator=g)
    rest = both[:, ::2].clone()
    odd = both[:, 1::2]
    more = changed(odd, 0.3, 6)
    delta.apply({"odd": odd}, delta.encode({"odd": odd}, {"odd": more}))
    assert equal(both[:, 1::2], more) and equal(both[:, ::2], rest)


def test_a_view_with_pending_signs_or_conjugates() -> None:
    x = torch.randn(50, dtype=torch.complex64)
    old = {"conjugate": x.conj(), "imaginary": x.conj().imag.clone()}
    new = {name: changed(v.resolve_conj(), 0.1, 2) for name, v in old.items()}
    delta.apply(old, delta.encode(old, new))
    assert equal(old["conjugate"].resolve_conj(), new["conjugate"])


def tied(seed: int = 0) -> dict[str, Tensor]:
    """What state_dict() gives of a model whose first and last layer share their weight."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(20, 30, generator=g).bfloat16()
    return {"embed": w, "bias": torch.randn(20, generator=g), "head": w}


def test_shared_memory_is_sent_once_and_changed_once() -> None:
    old, new = tied(), tied()
    new["embed"].view(torch.int16)[3:7] += 1
    once = delta.encode(old, new)
    assert len(once) < len(
        delta.encode({n: x.clone() for n, x in old.items()}, {n: x.clone() for n, x in new.items()})
    )
    there = tied()
    delta.apply(there, once)
    assert equal(there["head"], new["embed"]) and there["head"].data_ptr() == there["embed"].data_ptr()
    # a snapshot of clones, as one would write it
    assert delta.encode({name: x.clone() for name, x in old.items()}, new) == once
    # a receiver that keeps two copies
    apart = {name: x.clone() for name, x in old.items()}
    delta.apply(apart, once)
    assert all(equal(apart[name], new[name]) for name in new)
    # the other order of names
    other = tied()
    delta.apply({name: other[name] for name in ("head", "bias", "embed")}, once)
    assert equal(other["head"], new["embed"])


def test_memory_that_is_shared_on_one_side_only() -> None:
    old = {name: x.clone() for name, x in tied().items()}
    old["head"][0] += 1
    new = tied(1)  # tied only now, and different before
    message = delta.encode(old, new)
    delta.apply(old, message)
    assert equal(old["head"], new["head"]) and equal(old["embed"], new["embed"])
    separate = {name: x.clone() for name, x in tied().items()}
    there = tied()
    with pytest.raises(DeltaError, match="head and embed share their memory here, but not where"):
        delta.apply(there, delta.encode(tied(), separate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_partly_shared_memory_is_refused(dtype: torch.dtype) -> None:
    x = torch.zeros(20, dtype=dtype)
    views = {"x": x[:12], "y": x[8:]}
    with pytest.raises(DeltaError, match="y and x share a part of their memory"):
        delta.encode(views, views)
    other = {"x": x, "y": x.view(4, 5)}
    with pytest.raises(DeltaError, match="share a part"):
        delta.apply(
            other,
            delta.encode({n: v.clone() for n, v in other.items()}, {n: v.clone() for n, v in other.items()}),
        )
    disjoint = {"x": x[:10], "y": x[10:]}
    new = {name: changed(v, 0.5, 1) for name, v in disjoint.items()}
    delta.apply(disjoint, delta.encode(disjoint, new))
    assert equal(x[:10], new["x"]) and equal(x[10:], new["y"])


def test_out_must_not_share_memory_with_other_weights() -> None:
    old, new = some_weights()
    message = delta.encode(old, new)
    there = copied(old)
    x = torch.zeros(2, 30, 11, dtype=torch.bfloat16)
    x[:] = old["a"]
    with pytest.raises(DeltaError, match="out a shares memory with a of the weights"):
        delta.apply(
            {**there, "a": x.view(-1)[:330].view(30, 11)},
            message,
            out={**copied(old), "a": x.view(-1)[1:331].view(30, 11)},
        )
    partly = {**copied(old), "c": there["c"]}
    assert same(delta.apply(there, message, out=partly), new)  # type: ignore[arg-type]
    assert equal(there["a"], old["a"]) and equal(there["c"], new["c"])  # c was both


def test_parameters_that_require_gradients() -> None:
    model = torch.nn.Linear(30, 20)
    old = {name: x.detach().clone() for name, x in model.named_parameters()}
    new = {name: changed(x, 0.1, 7) for name, x in old.items()}
    delta.apply(dict(model.named_parameters()), delta.encode(old, new))
    assert all(equal(x.detach(), new[name]) for name, x in model.named_parameters())


def test_torchs_defaults_do_not_matter() -> None:
    old, new = some_weights()
    message = delta.encode(old, new)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert delta.encode(old, new) == message
        receiver = delta.Receiver(old)
        sender = delta.Sender({name: x.clone() for name, x in old.items()})
        assert receiver.apply(sender.message(full=True)) == 1
        delta.apply(old, message)
    finally:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)
    assert same(old, new)
