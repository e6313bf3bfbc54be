"""`make sass`: what the compiler made of cuda/, read from its machine code; needs nvcc and nvdisasm, no
GPU.

Every file of cuda/ is compiled for every architecture of the release list (TORCH_CUDA_ARCH_LIST is
respected). ptxas tells registers, shared memory and spills of each kernel; occupancy follows from these
and the architecture's limits. The passes over a group's elements are taken apart: the loop that moves
the elements is found in the control flow, and what it executes and moves per element is counted along
two ways through its body. At a branch on what does not change in the loop (a setting: norm, width of a
code) the cheap way takes the cheaper side and the dear way the dearer one; at all other branches (a
candidate is found, a tile is ragged) both take the cheaper one: what is rare is not counted. Both ways
go through the wide loads and stores. `all` is every instruction of the loop. Bytes are those of the
dear way; they are counted at the instruction, so a store by one lane of a warp counts as one by all.

Ends with 1 where a loop is not found. nvdisasm is looked for in --nvdisasm,
SIDCOMP_NVDISASM, PATH, beside nvcc, and in the package triton, which brings it along (`pip install
--no-deps triton`). Writes docs/cuda-sass.md and benchmarks/results/sass.json with --save.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "cuda-sass.md"
RECORD = ROOT / "benchmarks" / "results" / "sass.json"


class Limits(NamedTuple):
    """Of one multiprocessor (CUDA C++ Programming Guide, technical specifications per compute capability)."""

    threads: int
    blocks: int
    shared: int  # KiB
    reserved: int  # bytes of it that every block takes beside its own


LIMITS = {
    75: Limits(1024, 16, 64, 0),
    80: Limits(2048, 32, 164, 1024),
    86: Limits(1536, 16, 100, 1024),
    89: Limits(1536, 24, 100, 1024),
    90: Limits(2048, 32, 228, 1024),
    100: Limits(2048, 32, 228, 1024),
    120: Limits(1536, 24, 100, 1024),
}
REGISTERS = 64 << 10  # of a multiprocessor, in four parts
PER_WARP = 256  # registers are given to warps in such pieces
GRANULE = {75: 256}  # bytes of shared memory; 128 from 8.0 on

# Dynamic shared memory, which the machine code does not show: cuda/ asserts the first, the next two are PART
# floats and the cursors of a decode of 8, with packed indices the runs of four payloads as well. The last is
# a table, and symbols of 4 bits and the levels of a decode of 8.
DYNAMIC = {
    "sid_finish_kernel": 14 << 10,
    "sid_several_finish_kernel": 14 << 10,
    "packed_entries": (16 << 10) + 4 * (2048 + 8) + 32,
    "plain_entries": (16 << 10) + 64,
    "sid_deadzone_decode_kernel": 4 * (4096 + 8 * 4 * 128 + 8 * 16),
}


class Pass(NamedTuple):
    """A loop that moves elements: the innermost one that has `mark`, the loads or stores that do."""

    kernel: str  # regular expression for "file name<arguments>"
    what: str
    mark: str
    each: int  # elements of one thread that such an access stands for; below 0: that the iteration has
    avoid: str = r"^$"  # blocks with such an instruction are another dtype's
    inner: str = r"^$"  # a loop inside it, with such accesses, has a row of its own
    must: str = r"(LD|ST)G?\.E(\.EF)?\.128"  # both ways go through as many of these as there are,
    through: str = r"^$"  # and then of these


HALVES = r"(LDG\.E\.EF|STG?\.E)\.64"  # gradients and outputs of 2 bytes an element
QUAD = r"LDG\.E\.EF\.128"
OUT = r"ST\.E\.128"  # of segments: addresses from a table, which the compiler does not know as global
CODES = r"STG?\.E"  # words of a payload; the stores of ragged tiles look alike, but the wide ones come first
TILE, PAYLOAD = 32, 4  # elements that a thread has of a tile; payloads at once
PASSES = (
    Pass(r"linear\.cu sid_pass_kernel", "encode", QUAD, 4, r"LDG\.E\.EF\.64"),
    Pass(r"sid_pass_kernel", "encode", QUAD, 4, HALVES),
    Pass(r"sid_tile_kernel<.*true, \w+>$", "second pass", r"LDG\.E(\.EF)?\.128", 4, HALVES, through=CODES),
    Pass(r"sid_tile_kernel<.*false, \w+>$", "encode", QUAD, 4, HALVES, through=CODES),
    Pass(r"sid_randk_kernel", "encode", QUAD, 4, HALVES),
    Pass(r"sid_norm_kernel", "clip's norm", QUAD, 4, HALVES),
    Pass(r"sid_sum_kernel", "checksum", QUAD, 4, HALVES),
    Pass(r"linear\.cu sid_look_kernel", "check", QUAD, 4, HALVES),
    Pass(r"sparse\.cu sid_check_kernel|sid_dense_check_kernel", "check", r"LDG\.E\.64", 2),
    Pass(r"quant\.cu sid_dense_decode_kernel<.*body<3>", "decode, each payload", r"LDG?\.E$", -TILE),
    Pass(r"quant\.cu sid_dense_decode_kernel", "decode, each payload", r"LDG\.E\.EF", -TILE),
    Pass(r"signs\.cu sid_dense_decode_kernel", "decode, each payload", r"LDG\.E\.EF", -TILE * PAYLOAD),
    Pass(r"sid_dense_decode_kernel", "decode, the rest", OUT, -TILE, r"ST\.E\.64", r"LDG\.E\.EF", must=OUT),
    Pass(r"linear\.cu sid_decode_kernel", "decode of one", OUT, 4, HALVES, must=OUT),
    Pass(r"sparse\.cu sid_decode_kernel", "decode, the rest", OUT, -4, r"ST\.E\.64", must=OUT),
    Pass(r"sid_randk_decode_kernel", "decode, the rest", OUT, -4, r"ST\.E\.64", must=OUT),
    Pass(r"sid_ternary_(decode|look)_kernel", "decode, each payload", r"LDG\.E\.EF", -TILE),
    Pass(r"sid_ternary_decode_kernel", "decode, the rest", OUT, -TILE, r"ST\.E\.64", r"LDG\.E\.EF", must=OUT),
    Pass(r"sid_hop_kernel", "hop, but for its draws", r"LDG?\.E\.128", -128),
    Pass(r"sid_ring_sum_kernel", "checksum of signs", r"LDG?\.E\.128", -128),
    Pass(r"sid_sum_slices_kernel", "sum, each rank", r"LDG\.E\.EF\.128", 4, HALVES),
    Pass(r"sid_sum_bytes_kernel", "sum, each rank", r"LDG?\.E", 4),
    Pass(r"sid_pieces_out_kernel", "slices out", r"LDG?\.E\.128", 4),
    Pass(r"sid_pieces_in_kernel", "slices in", r"LDG?\.E\.128", 4),
    Pass(r"sid_scatter_kernel", "slices out", r"LDG?\.E\.128", 4, r"LDG?\.E\.64"),
    Pass(r"sid_spread_kernel", "mean out", r"LDG\.E\.EF\.128", 4),
    Pass(r"sid_look_frames_kernel", "check", r"LDG?\.E\.128", 4),
    Pass(r"sid_add_up_kernel", "sum, each rank", r"LDG\.E\.EF\.128", 4, HALVES),
    Pass(r"sid_nodes_write_kernel", "write", OUT, 4, r"ST\.E\.64", must=OUT),
    Pass(r"sid_second_shot_kernel", "zeros after a fault", r"STG?\.E\.128", 4),
    Pass(
        r"sid_power_pass_kernel<.*pass_shape<4u>", "encode, with all that may be", r"LDG?\.E\.EF", 1,
        r"LDG?\.E\.EF\.U16", must=r"(STG?|LDG?)\.E",
    ),
    Pass(
        r"sid_power_pass_kernel<.*pass_shape<8u>", "8 columns more", r"LDG?\.E\.EF", 1,
        r"LDG?\.E\.EF\.U16", must=r"LDG?\.E",
    ),
    Pass(r"sid_power_strip_kernel", "second factor", r"LDG?\.E(\.EF)?", 1),
    Pass(r"sid_power_output_kernel", "decode of rank 1", r"STG?\.E", 1),
    Pass(r"sid_power_look_kernel", "check", r"LDG?\.E", 1),
)  # fmt: skip  # of several for the same the first holds


# ---- a listing ---------------------------------------------------------------------------------


class Instruction(NamedTuple):
    guard: str  # "P0", "!UP1" or ""
    op: str  # with its modifiers
    operands: str

    @property
    def bytes(self) -> int:
        """Per thread, of an access to memory."""
        width = re.search(r"\.(U?8|S8|U?16|S16|64|128)\b", self.op)
        return {"8": 1, "16": 2, "64": 8, "128": 16}[width[1].lstrip("US")] if width else 4


class Block:
    """Instructions that are executed one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.code: list[Instruction] = []
        self.to: list[int] = []  # of a conditional branch: the target, then what follows


LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"`?\((\.L_x?_?\w+)\)")
TARGETS = re.compile(r"(?:BRANCH_TARGETS |,)(\.L_\w+)")


def functions(listing: str) -> Iterator[tuple[str, list[str]]]:
    """The kernels' mangled names and lines of what `nvdisasm` prints."""
    name, lines = "", []
    for line in listing.splitlines():
        if line.startswith("\t.section") or line.startswith(".section"):
            if name:
                yield name, lines
            name, lines = "", []
        elif line.startswith(".text.") and line.endswith(":"):
            name, lines = line[6:-1], []
        elif name:
            lines.append(line)
    if name:
        yield name, lines


def blocks_of(lines: Iterable[str]) -> list[Block]:
    """The control flow of a function, its entry first. A call returns to what follows it."""
    blocks, places, waits = [Block("")], {}, {}
    jumps: list[tuple[int, str]] = []
    falls: set[int] = set()  # blocks that run into the next one

    for line in lines:
        if line.startswith("."):
            label = line.split(":")[0]
            if re.match(r"\.L_\w+", label):
                if blocks[-1].code:
                    falls.add(len(blocks) - 1)
                    blocks.append(Block(label))
                blocks[-1].name = label
                places[label] = len(blocks) - 1
            continue
        m = LINE.match(line)
        if not m:
            continue
        i = Instruction(m[1] or "", m[2].removesuffix(".SYS"), m[3])  # Turing says it of every access
        here, target = len(blocks) - 1, LABEL.search(i.operands)
        blocks[-1].code.append(i)
        op = i.op.split(".")[0]
        if op == "BSSY" and target:
            waits[i.operands.split(",")[0]] = target[1]
        if op == "BSYNC" and i.operands in waits:
            jumps.append((here, waits[i.operands]))
        elif i.op == "BRA.DIV":  # only where a warp has come apart, and then it comes together there
            falls.add(here)
        elif op in ("BRA", "JMP") and target:
            jumps.append((here, target[1]))
            if i.guard or "," in i.operands:  # "BRA P0, (label)": a second condition
                falls.add(here)
        elif op == "BRX":  # through a table, whose labels nvdisasm names
            jumps += [(here, label) for label in TARGETS.findall(line)]
            if i.guard:
                falls.add(here)
        elif op in ("EXIT", "RET", "KILL"):
            if i.guard:
                falls.add(here)
        else:
            continue
        blocks.append(Block(""))
    for here, label in jumps:
        if label in places:
            blocks[here].to.append(places[label])
    for here in falls:
        if here + 1 < len(blocks) and here + 1 not in blocks[here].to:
            blocks[here].to.append(here + 1)
    return blocks


# ---- loops -------------------------------------------------------------------------------------


class Loop(NamedTuple):
    head: int
    body: frozenset[int]


def order_of(blocks: list[Block]) -> list[int]:
    """What the entry reaches, each block before those that follow it but for the ways back."""
    seen, order = {0}, []
    stack = [(0, iter(blocks[0].to))]
    while stack:
        at, to = stack[-1]
        nxt = next((b for b in to if b not in seen), None)
        if nxt is None:
            order.append(at)
            stack.pop()
        else:
            seen.add(nxt)
            stack.append((nxt, iter(blocks[nxt].to)))
    return order[::-1]


def loops_of(blocks: list[Block]) -> list[Loop]:
    """Natural loops: what reaches a way back to a block without passing it; one for each such block."""
    order = order_of(blocks)
    place = {b: i for i, b in enumerate(order)}
    before: dict[int, list[int]] = {b: [] for b in order}
    for b in order:
        for t in blocks[b].to:
            before[t].append(b)
    dominators = {b: (1 << len(order)) - 1 for b in order}
    dominators[0] = 1 << place[0]
    changed = True
    while changed:
        changed = False
        for b in order[1:]:
            new = (1 << len(order)) - 1
            for p in before[b]:
                new &= dominators[p]
            new |= 1 << place[b]
            if new != dominators[b]:
                dominators[b], changed = new, True
    bodies: dict[int, set[int]] = {}
    for b in order:
        for head in blocks[b].to:
            if dominators[b] >> place[head] & 1:
                body = bodies.setdefault(head, {head})
                stack = [b]
                while stack:
                    at = stack.pop()
                    if at not in body:
                        body.add(at)
                        stack += before[at]
    return [Loop(head, frozenset(body)) for head, body in bodies.items()]


def innermost(blocks: list[Block], loops: list[Loop], mark: str) -> Loop | None:
    """The smallest of the loops that have as many marked accesses as any smallest loop has."""

    def marks(body: Iterable[int]) -> int:
        return sum(bool(re.fullmatch(mark, i.op)) for b in body for i in blocks[b].code)

    own = []
    for loop in loops:
        inside = frozenset().union(*(k.body for k in loops if k.body < loop.body))
        own.append((marks(loop.body - inside), sum(len(blocks[b].code) for b in loop.body), loop))
    found = [o for o in own if o[0]]
    return max(found, key=lambda o: (o[0], -o[1]))[2] if found else None


# ---- the ways through a loop -------------------------------------------------------------------


NO_RESULT = {
    "STG", "ST", "STS", "STL", "RED", "BRA", "BSSY", "BSYNC", "EXIT", "RET", "CALL", "BAR", "NOP", "WARPSYNC",
    "BREAK", "MEMBAR",
}  # fmt: skip


def written(i: Instruction) -> tuple[list[str], int]:
    """Registers and predicates that an instruction sets, and how many of its operands these are. A register
    that predicates are packed into bit by bit has those bits as names, R1&4, and R1& for any."""
    if i.op.split(".")[0] in NO_RESULT:
        return [], 0
    operands = [o.strip() for o in i.operands.split(",")]
    if bits := packed(i):
        return [f"{operands[0]}&", *(f"{operands[0]}&{bit}" for bit in bits)], len(operands)
    is_predicate = [bool(re.fullmatch(r"U?P[\dTR]", o)) for o in operands] + [False]
    if is_predicate[0]:  # one or two
        count = 1 + is_predicate[1]
        return operands[:count], count
    wide = 4 if ".128" in i.op else 2 if re.search(r"\.64|\.WIDE|F64|^D|^CS2R", i.op) else 1
    out, count = [operands[0]], 1
    if m := re.fullmatch(r"(U?R)(\d+)", operands[0]):
        out = [f"{m[1]}{int(m[2]) + k}" for k in range(wide)]
    while is_predicate[count]:  # carries
        out.append(operands[count])
        count += 1
    return out, count


def bits_of(mask: int) -> list[int]:
    return [1 << k for k in range(32) if mask >> k & 1]


def packed(i: Instruction) -> list[int]:
    """Bits that an instruction sets or clears in a register whose other bits it leaves."""
    m = re.fullmatch(r"(R\d+), \1(?:\.reuse)?, (0x[0-9a-f]+), RZ, (0xc0|0xfc), !PT", i.operands)
    if i.op == "LOP3.LUT" and m:
        mask = int(m[2], 16)
        return bits_of(mask if m[3] == "0xfc" else ~mask)
    m = re.fullmatch(r"(R\d+), PR, \1(?:\.reuse)?, (0x[0-9a-f]+)", i.operands)
    return bits_of(int(m[2], 16)) if i.op == "P2R" and m else []


def read(i: Instruction) -> list[str]:
    """Registers, bits of packed ones, and predicates that it depends on, its guard among them."""
    guard = [i.guard.lstrip("!")] if i.guard and not i.guard.endswith("PT") else []
    if m := re.fullmatch(r"U?P\d, RZ, (R\d+)(?:\.reuse)?, (0x[0-9a-f]+), RZ, 0xc0, !PT", i.operands):
        bits = bits_of(int(m[2], 16))
        return [f"{m[1]}&{bits[0]}" if len(bits) == 1 else m[1], *guard]
    if i.op == "P2R":
        return [f"P{k}" for k in range(7)]
    rest = ",".join(i.operands.split(",")[written(i)[1] :])
    return [*re.findall(r"(?<![\w.])(U?R\d+|U?P\d)(?!\w)", rest), *guard]


# What these make of what does not change does not change.
STEADY = {
    "MOV", "UMOV", "LDC", "LDCU", "ULDC", "ISETP", "UISETP", "FSETP", "LOP3", "ULOP3", "PLOP3", "UPLOP3",
    "PRMT", "UPRMT", "IADD", "IADD3", "UIADD3", "VIADD", "IMAD", "UIMAD", "LEA", "ULEA", "SHF", "USHF", "SEL",
    "USEL",
    "FSEL", "R2UR", "I2F", "FADD", "FMUL", "IABS",
}  # fmt: skip


def settings_of(blocks: list[Block], loop: Loop) -> set[int]:
    """Blocks of the loop that end in a branch on what no iteration changes."""
    code = [(b, k) for b in loop.body for k in range(len(blocks[b].code))]
    setters: dict[str, list[tuple[int, int]]] = {}
    sources: dict[tuple[int, int], list[list[tuple[int, int]] | str]] = {}

    def names_of(name: str) -> tuple[str, str]:
        """What sets a name beside itself: a register its bits, or a bit its register."""
        return name, name.split("&")[0] if "&" in name else f"{name}&"

    for b in loop.body:
        latest: dict[str, list[tuple[int, int]]] = {}  # in this block
        for k, i in enumerate(blocks[b].code):
            here = [[place for n in names_of(name) for place in latest.get(n, [])] for name in read(i)]
            sources[b, k] = [own or name for own, name in zip(here, read(i), strict=True)]
            for name in written(i)[0]:
                if not i.guard:
                    latest[name] = [(b, k)]
                elif name in latest:
                    latest[name] = [*latest[name], (b, k)]
                setters.setdefault(name, []).append((b, k))
    steady: set[tuple[int, int]] = set()

    def holds(source: list[tuple[int, int]] | str) -> bool:
        if isinstance(source, str):
            source = [place for n in names_of(source) for place in setters.get(n, [])]
        return all(place in steady for place in source)

    while True:
        new = {
            (b, k)
            for b, k in code
            if (b, k) not in steady
            and blocks[b].code[k].op.split(".")[0] in STEADY
            and all(map(holds, sources[b, k]))
        }
        if not new:
            break
        steady |= new
    ends = {b: sources[b, len(blocks[b].code) - 1] for b in loop.body if len(blocks[b].to) > 1}
    return {b for b, end in ends.items() if end and all(map(holds, end))}


class Way(NamedTuple):
    """What one iteration executes."""

    marks: int = 0
    must: int = 0
    through: int = 0
    cost: int = 0
    loaded: int = 0
    stored: int = 0
    blocks: tuple[int, ...] = ()


def way_through(blocks: list[Block], loop: Loop, p: Pass, skip: frozenset[int], dear: bool) -> Way | None:
    """From the loop's head to its end. Loops inside are passed once or not at all; `skip` costs nothing."""
    settings = settings_of(blocks, loop)
    place = {b: i for i, b in enumerate(order_of(blocks))}
    best: dict[int, Way] = {}
    for b in sorted(loop.body, key=lambda b: -place[b]):
        code = [] if b in skip else blocks[b].code
        if any(re.fullmatch(p.avoid, i.op) for i in code):
            continue
        after = [best[t] for t in blocks[b].to if t in best and place[t] > place[b]]
        after += [Way() for t in blocks[b].to if t == loop.head]
        if not after:
            continue
        most = max((w.must, w.through) for w in after)
        able = [w for w in after if (w.must, w.through) == most]
        rest = (max if dear and b in settings else min)(able, key=lambda w: w.cost)
        loads, stores = ([i for i in code if re.match(rf"{what}G?\.", i.op)] for what in ("LD", "ST"))
        moved = loads + stores
        marks = sum(bool(re.fullmatch(p.mark, i.op)) for i in moved)
        best[b] = Way(
            rest.marks + marks,
            rest.must + sum(bool(re.fullmatch(p.mark, i.op) or re.fullmatch(p.must, i.op)) for i in moved),
            rest.through + sum(bool(re.fullmatch(p.through, i.op)) for i in code),
            rest.cost + len(code),
            rest.loaded
            + sum(i.bytes for i in loads if not i.guard or re.fullmatch(f"{p.must}|{p.mark}", i.op)),
            rest.stored + sum(i.bytes for i in stores),
            (b, *rest.blocks),
        )
    return best.get(loop.head)


def passes_of(kernel: str, listing: Iterable[str]) -> list[dict[str, Any]]:
    """A row for each pass of a kernel."""
    rows: list[dict[str, Any]] = []
    chosen: dict[str, Pass] = {}
    for p in PASSES:
        if re.search(p.kernel, kernel):
            chosen.setdefault(p.what, p)
    if not chosen:
        return rows
    blocks = blocks_of(listing)
    loops = loops_of(blocks)
    for p in chosen.values():
        row: dict[str, Any] = {"kernel": kernel, "pass": p.what}
        rows.append(row)
        loop = innermost(blocks, loops, p.mark)
        if loop is None:
            continue
        inner = innermost(blocks, [k for k in loops if k.body < loop.body], p.inner)
        skip = inner.body if inner else frozenset()
        cheap, dear = (way_through(blocks, loop, p, skip, dear) for dear in (False, True))
        if cheap is None or dear is None:
            continue
        elements = -p.each if p.each < 0 else p.each * dear.marks
        code = [i for b in loop.body - skip for i in blocks[b].code]
        row.update(
            loop=blocks[loop.head].name,
            elements=elements,
            cheap=cheap.cost / elements,
            dear=dear.cost / elements,
            all=len(code) / elements,
            loaded=dear.loaded / elements,
            stored=dear.stored / elements,
            vector=max(i.bytes for i in code if re.fullmatch(p.mark, i.op)),
            local=sum(i.op.startswith(("LDL", "STL")) for i in code),
        )
    return rows


# ---- resources ---------------------------------------------------------------------------------


def resources_of(log: str) -> dict[str, dict[str, int]]:
    """Of each kernel, mangled, what `ptxas -v` says."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:

        def number(pattern: str, part: str = part) -> int:
            m = re.search(pattern, part)
            return int(m[1]) if m else 0

        found[part.split("'")[0]] = {
            "registers": number(r"Used (\d+) registers"),
            "shared": number(r"(\d+) bytes smem"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spilled": number(r"(\d+) bytes spill stores"),
            "refilled": number(r"(\d+) bytes spill loads"),
        }
    return found


def threads_of(information: str) -> dict[str, int]:
    """Of each kernel the threads of a block, from its launch bounds, in what nvdisasm says of it."""
    found = {}
    for part in re.split(r"\n\s*\.section\s+\.nv\.info\.", information)[1:]:
        m = re.search(r"EIATTR_MAX_THREADS\s.*?\.word\s+0x([0-9a-f]+)", part, re.S)
        if m:
            found[re.split(r"[,\s]", part, maxsplit=1)[0].strip('"')] = int(m[1], 16)
    return found


def occupancy(arch: int, threads: int, registers: int, shared: int) -> int:
    """Blocks that a multiprocessor holds at once."""
    limits = LIMITS[arch]
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // PER_WARP) * PER_WARP
    by_registers = 4 * (REGISTERS // 4 // per_warp) // warps
    granule = GRANULE.get(arch, 128)
    each = -(-(shared + limits.reserved) // granule) * granule
    by_shared = (limits.shared << 10) // each if each else limits.blocks
    return min(limits.blocks, limits.threads // (32 * warps), by_registers, by_shared)


# ---- compiling and reading ---------------------------------------------------------------------


def demangled(names: list[str]) -> list[str]:
    """Without namespaces and parameters."""
    tool = shutil.which("c++filt")
    if not tool:
        sys.exit("sass: c++filt is missing (Debian, Ubuntu: apt-get install binutils)")
    out = subprocess.run([tool], input="\n".join(names), text=True, capture_output=True, check=True).stdout
    return [short(n) for n in out.splitlines()]


def short(name: str) -> str:
    """`void sid_pass_kernel<sid_memory1, (anonymous namespace)::linear>(...)` is
    `sid_pass_kernel<memory1, linear>`."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.sub(r"\(\w+\)(?=\d)", "", name)  # which enum a number is of
    return re.sub(r"(?<=[<, ])sid_", "", name.split("(")[0])


def find_nvdisasm(given: str | None, nvcc: str) -> str:
    tries = [
        given or os.environ.get("SIDCOMP_NVDISASM"),
        shutil.which("nvdisasm"),
        str(Path(nvcc).parent / "nvdisasm"),
    ]
    package = importlib.util.find_spec("triton")
    if package is not None and package.origin is not None:
        tries.append(str(Path(package.origin).parent / "backends/nvidia/bin/nvdisasm"))
    for t in tries:
        if t and os.access(t, os.X_OK):
            return t
    sys.exit(
        "sass: no nvdisasm: it comes with the CUDA toolkit and inside the package triton "
        "(pip download --no-deps triton; triton/backends/nvidia/bin); name it in SIDCOMP_NVDISASM"
    )


def sources() -> list[str]:
    """The files of cuda/, from there; no two have the same name, which is what tables call them by."""
    return sorted(
        (str(p.relative_to(ROOT / "cuda")) for p in (ROOT / "cuda").glob("*/*.cu")), key=os.path.basename
    )


def cubin_of(out: Path, file: str) -> Path:
    return out / "cuda" / Path(file).with_suffix(".cubin")


def compile_all(nvcc: str, arch: int, files: list[str]) -> Path:
    """cuda/*/*.cu to cubins, with the library's own flags; what ptxas says beside them."""
    out = ROOT / "build" / "sass" / f"sm_{arch}"
    made = [str(cubin_of(out, f)) for f in files]
    command = [
        os.environ.get("MAKE") or "make", "-C", str(ROOT), "-s", "--no-print-directory",
        f"-j{os.environ.get('MAX_JOBS') or os.cpu_count()}", f"O={out}", f"NVCC={nvcc}",
        f"GENCODE=-arch=sm_{arch}", f"ARCH={arch}", "WERROR=1", *made,
    ]  # fmt: skip
    clean = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "NVCCFLAGS")
    }
    if subprocess.run(command, env=clean).returncode:
        sys.exit(f"sass: compiling for sm_{arch} failed; the compiler's message is above")
    return out


def listing_of(nvdisasm: str, cubin: Path) -> str:
    return subprocess.run([nvdisasm, str(cubin)], text=True, capture_output=True, check=True).stdout


def read_arch(
    nvdisasm: str, out: Path, arch: int, files: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of kernels and of passes."""
    kernels, passes = [], []
    for f in files:
        cubin = cubin_of(out, f)
        resources = resources_of(cubin.with_suffix(".cubin.log").read_text())
        if not resources:
            continue
        listing = listing_of(nvdisasm, cubin)
        threads, code = threads_of(listing), dict(functions(listing))
        names = dict(zip(resources, demangled(list(resources)), strict=True))
        for mangled, r in resources.items():
            name = f"{os.path.basename(f)} {names[mangled]}"
            dynamic = next((v for k, v in DYNAMIC.items() if k in name), 0)
            blocks = occupancy(arch, threads[mangled], r["registers"], r["shared"] + dynamic)
            kernels.append(
                {
                    "arch": arch, "kernel": name, "threads": threads[mangled], **r, "dynamic": dynamic,
                    "local": len(re.findall(r"\b(?:LDL|STL)\b", "\n".join(code[mangled]))),
                    "blocks": blocks,
                    "occupancy": blocks * threads[mangled] / LIMITS[arch].threads,
                }
            )  # fmt: skip
            passes += [{"arch": arch, **row} for row in passes_of(name, code[mangled])]
    return kernels, passes


# ---- the report --------------------------------------------------------------------------------


def percent(x: float) -> str:
    return f"{100 * x:.0f} %"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(r) + " |" for r in rows),
    ]


def span(values: list[Any], form: Callable[[Any], str] = str) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


LOOPS = """\
# The kernels' machine code

Written by `make sass ARGS=--save` ([how](../benchmarks/sass.py)); nvcc {nvcc}, warnings as errors, {archs}.
Nothing here was timed: [cuda.md](cuda.md) says what that leaves open.

## Loops over elements, sm_{shown}

Of the loop that moves the elements, per element (of a check: per 4-byte word of a payload):

- `cheap`, `dear`: instructions on the quick way in float32, with the settings (of memory, norm, width) for
  which it is shortest and longest. Not in them is what is rare: candidates, ragged tiles.
- `all`: every instruction of the loop; all dtypes, ragged tiles and candidates included.
- `read`, `written`: bytes. What many lanes load from one place counts for each, though it moves once.
- `vector`: bytes a thread moves at once. `local`: loads and stores of local memory in the loop, on any
  architecture.

At 12 bytes an element an H200 has time for 93 instructions an element; at b bytes for 7.8 b. This counts an
issue slot for each. Integer instructions issue at half that rate on sm_90, so a loop of integers alone has
time for half as many: 46 at 12 bytes. No column tells integers from others.

"""
RESOURCES = """
## Resources

Over all architectures, where they differ. `occupancy`: threads that a multiprocessor holds at once, of those
it could; `shared`: with what is given at the launch, 14 KiB of a finish and a decode's cursors for 8
payloads. `spilled`: bytes that a thread stores to local memory for want of registers, or for a call, and how
many loads and stores of local memory the kernel has in all.

"""


def markdown(record: dict[str, Any], shown: int) -> str:
    """One architecture whole, of the others what differs: registers, spills, occupancy."""
    kernels, passes = record["kernels"], record["passes"]
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for k in kernels:
        by_name.setdefault(k["kernel"], {})[k["arch"]] = k
    archs = ", ".join(f"sm_{a}" for a in record["archs"])
    lines = LOOPS.format(nvcc=record["nvcc"], archs=archs, shown=shown).splitlines()
    rows = []
    for p in passes:
        if p["arch"] != shown or "dear" not in p:
            continue
        same = [q for q in passes if (q["kernel"], q["pass"]) == (p["kernel"], p["pass"]) and q.get("local")]
        local = ", ".join(f"sm_{q['arch']}: {q['local']}" for q in same) or "0"
        numbers = [f"{p['cheap']:.1f}", f"{p['dear']:.1f}", f"{p['all']:.0f}"]
        moved = [f"{p['loaded']:.2f}", f"{p['stored']:.2f}", str(p["vector"])]
        rows.append([f"`{p['kernel']}`", p["pass"], *numbers, *moved, local])
    lines += table(["kernel", "loop", "cheap", "dear", "all", "read", "written", "vector", "local"], rows)
    lines += RESOURCES.splitlines()
    rows = []
    for name, of in by_name.items():
        k = list(of.values())
        spilled = [
            f"sm_{a}: {x['spilled']} B, {x['local']}" for a, x in of.items() if x["spilled"] or x["local"]
        ]
        rows.append(
            [
                f"`{name}`", str(k[0]["threads"]), span([x["registers"] for x in k]),
                span([x["shared"] + x["dynamic"] for x in k]), span([x["blocks"] for x in k]),
                span([x["occupancy"] for x in k], percent), "; ".join(spilled) or "0",
            ]
        )  # fmt: skip
    lines += table(["kernel", "threads", "registers", "shared", "blocks", "occupancy", "spilled"], rows)
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks import compact_json
    from setup import archs, find_nvcc

    parser = argparse.ArgumentParser(prog="python -m benchmarks.sass", description=__doc__)
    parser.add_argument("--files", nargs="+", help="of cuda/, without folder and ending (default: all)")
    parser.add_argument(
        "--show", type=int, default=90, help="the architecture of the table of loops (default 90)"
    )
    parser.add_argument("--nvdisasm", help="the program")
    parser.add_argument(
        "--save", action="store_true", help="write docs/cuda-sass.md and benchmarks/results/sass.json"
    )
    args = parser.parse_args(argv)
    nvcc = find_nvcc()
    if not nvcc:
        sys.exit("sass: no nvcc (CUDA toolkit); name it in SIDCOMP_NVCC")
    nvdisasm = find_nvdisasm(args.nvdisasm, nvcc)
    flags, _ = archs(nvcc, os.environ.get("TORCH_CUDA_ARCH_LIST") or "all")
    wanted = sorted({int(n) for n in re.findall(r"sm_(\d+)", flags)})
    if unknown := [a for a in wanted if a not in LIMITS]:
        sys.exit(f"sass: the limits of sm_{unknown[0]} are not in benchmarks/sass.py; it has {list(LIMITS)}")
    files = sources()
    if missing := set(args.files or []) - {Path(f).stem for f in files}:
        parser.error(f"no {min(missing)}.cu in cuda/; it has {', '.join(Path(f).stem for f in files)}")
    if args.files:
        files = [f for f in files if Path(f).stem in args.files]
    version = re.search(r"release (\S+),", subprocess.check_output([nvcc, "--version"], text=True))
    record: dict[str, Any] = {
        "nvcc": version[1] if version else "",
        "archs": wanted,
        "kernels": [],
        "passes": [],
    }
    for arch in wanted:
        out = compile_all(nvcc, arch, files)
        kernels, passes = read_arch(nvdisasm, out, arch, files)
        record["kernels"] += kernels
        record["passes"] += passes
    shown = args.show if args.show in wanted else wanted[-1]
    text = markdown(record, shown)
    if args.save:
        DOC.write_text(text)
        passes = [p for p in record["passes"] if p["arch"] == shown]
        kept = record | {
            "kernels": compact_json.table(record["kernels"]),
            "passes": compact_json.table(passes),
        }
        RECORD.write_text(compact_json.dumps(kept))
    else:
        print(text)
    lost = [p for p in record["passes"] if "dear" not in p]
    for p in lost:
        print(f"sass: sm_{p['arch']}: {p['kernel']}, {p['pass']}: no loop found", file=sys.stderr)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
