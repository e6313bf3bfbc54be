"""docs/codecs.md, which `sidcomp codecs --markdown` prints: the registry, the recommended codecs first."""

import re
from collections.abc import Sequence

from sidcomp import core as _core
from sidcomp.config.registry import Codec, Parameter, codecs, memories

RECOMMENDED = {  # for what; the first is the safest
    "bf16": "the least risk: rounding only",
    "fp16": "the same, with more precision and less range",
    "int4": "gradients with Adam",
    "int2": "updates, in half of int4's bytes; less good for gradients",
    "topk": 'gradients with SGD, as `sidcomp.preset("topk-fortieth")` (1/40); updates (`ratio=100`)',
    "lossless": "where nothing may be rounded",
}
_SHARED = ("density", "values", "indices", "memory_dtype")  # parameters that the page explains once
_LONG = 23  # words
_FAMILIES = {
    "sparse": "Sparse: the largest elements, or random ones",
    "quantised": "Quantised: every element in a few bits",
    "sign": "Signs: one bit for each element",
    "low rank": "Low rank",
    "dense": "Uncompressed",
}

_INTRODUCTION = """\
# Codecs and memories

A codec turns a vector into a payload, and a memory keeps what was not sent. Name a codec with its parameters:
`sidcomp.compress(model, optimizer, "topk", density=0.01)`. Without a name
sidcomp [chooses](start.md#what-auto-does). `sidcomp codecs NAME` explains a codec and its parameters in full.

## Recommended

| codec | payload, of float32's bytes | for | how it works |
|---|---|---|---|
"""

_SPARSE = """\
Sparse codecs, `topk` among them, take `density`, the fraction of the elements that is sent, or `ratio=R`, at
most 1/R of the bytes. `values="log4"` and `indices="packed"` send each element in fewer bits.
"""

_SENT = """
## Bytes that a rank sends

With n ranks plain DDP sends 2(n-1)/n of the gradient's bytes, an all-gather n-1 payloads, and two-shot
2(n-1)/n payloads. From three ranks on sidcomp takes two-shot by itself, if codec and memory suit it
([what it costs](exchanges.md#two-shot)). `Options(exchange="allgather")` keeps the all-gather.
"""

_MEMORIES = """
## Memories

Each codec comes with the memory of its paper; `options=sidcomp.Options(memory="dgc")` names another. A memory
takes 4 bytes for each element on every rank, `dgc` 8. `memory_dtype="bfloat16"` halves that; it is not
implemented for CUDA.

| memory | what it does, and its source | parameters |
|---|---|---|
"""

_END = """
- **The learning rate.** An element that is sent late is multiplied by a later rate. `compress` follows the
  optimizer and rescales the residual by the old rate over the new one (EF-SGD; Karimireddy et al. 2019).
- **`dgc`** returns velocities, up to 1/(1 - momentum) times as large as gradients: clip by
  `run.clip_grad_norm_(1.0)`, which allows for it, or before compression with `clip_norm=1.0`.
- **`compensation`** is for `marsit`: choose `eta_s` as large as the gradient's elements, and
  `Options(full_every=100)`.
- **A step that is not finite** is discarded on all ranks, and is never sent later.
"""


def recommended_first() -> list[Codec]:
    found = {c.name: c for c in codecs()}
    return [found[name] for name in RECOMMENDED] + [c for c in codecs() if c.name not in RECOMMENDED]


def markdown_page() -> str:
    found = {c.name: c for c in codecs()}
    page = _INTRODUCTION
    for name, use in RECOMMENDED.items():
        page += f"| `{name}` | {_share(found[name])} | {use} | {found[name].doc} |\n"
    page += _SENT
    for family, title in _FAMILIES.items():
        rows = _rows([c for c in codecs() if c.family == family and c.name not in RECOMMENDED])
        page += f"\n## {title}\n\n" + (f"{_SPARSE}\n" if family == "sparse" else "")
        page += f"| codec | how it works, and its source | parameters |\n|---|---|---|\n{rows}"
    return f"{page}{_MEMORIES}{_rows(memories())}{_END}"


def _rows(entries: Sequence[Codec]) -> str:
    lines, first = "", set[str]()
    for entry in entries:
        own = [f"`{p.name}={default(p)}`" for p in entry.parameters if p.name not in _SHARED]
        if first and first <= set(own):
            own = ["as above", *(p for p in own if p not in first)]
        else:
            first = set(own) if len(own) > 3 else set()
        source = f" {_source(entry)}." if entry.paper else ""
        lines += f"| `{entry.name}` | {_short(entry.doc)}{source} | {', '.join(own)} |\n"
    return lines


def _short(text: str) -> str:
    """The first sentence of a long text."""
    return text if len(text.split()) <= _LONG else text.partition(". ")[0].rstrip(".") + "."


def _source(entry: Codec) -> str:
    """The papers, without the places in them."""
    return re.split(r"(?<=\d\)), |: |(?<=\d{4}) \(|, (?:with|table|section) ", entry.paper)[0]


def _share(c: Codec) -> str:
    """Returns the size of a payload as a share of float32's bytes, with the default parameters."""
    n = 1 << 20
    share = _core.Plan(c.name, c.memory, n, "float32").payload_bytes / (4 * n)
    return f"{100 * share:.0f} %" if share > 0.51 else f"1/{1 / share:.0f}"


def default(p: Parameter) -> str:
    return f"{p.default:g}" if isinstance(p.default, float) else str(p.default)
