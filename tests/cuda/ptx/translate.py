"""PTX to C++: every kernel of a module as a function that runs on the emulation's fibers (emulate.h).

What runs is then the compiler's code for cuda/'s own sources, not the C++ of these sources. The rules are
those of the PTX ISA manual; test_ptx_instructions.py compares each with a rule of its own. The translator
refuses by name each instruction, modifier or operand that it does not know, and float arithmetic that does
not say how it rounds.

A register is a word of its own width, floats included. Shared memory is one block of bytes: dynamic first,
static from STATIC on; a shared address is an offset in it. Parameters are bytes where the launch has put
them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

STATIC = (64 << 10) + 64  # emulate.cpp: behind the dynamic shared memory and its guard
STATIC_END = STATIC + (48 << 10)
WIDTH = {
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "pred": 1,
}  # fmt: skip
WORD = {1: "bool", 8: "uint8_t", 16: "uint16_t", 32: "uint32_t", 64: "uint64_t"}
SPECIAL = {
    "%tid.x": "threadIdx.x", "%ntid.x": "blockDim.x", "%ctaid.x": "blockIdx.x", "%nctaid.x": "gridDim.x",
    "%tid.y": "0u", "%ntid.y": "1u", "%ctaid.y": "0u", "%nctaid.y": "1u",
    "%tid.z": "0u", "%ntid.z": "1u", "%ctaid.z": "0u", "%nctaid.z": "1u",
    "%laneid": "(threadIdx.x % 32u)", "%lanemask_lt": "((1u << threadIdx.x % 32u) - 1u)",
    "%envreg1": "ptx_grid(1)", "%envreg2": "ptx_grid(2)",
}  # fmt: skip


class RefusedError(Exception):
    """What the translator does not know; the text names it."""


def is_float(type_: str) -> bool:
    return type_ in ("f32", "f64")


def c_type(type_: str) -> str:
    """What a value of this type is computed in."""
    if type_ in ("f32", "f64"):
        return "float" if type_ == "f32" else "double"
    return ("int" if type_[0] == "s" else "uint") + f"{WIDTH[type_]}_t"


# ---- the text of a module --------------------------------------------------------------------------------


@dataclass
class Instruction:
    """`@!%p1 setp.lt.and.u32 %p2|%p3, %r1, 4, %p4`: guard "!%p1", name "setp", words ["lt", "and", "u32"]."""

    text: str
    guard: str
    name: str
    words: list[str]
    operands: list[str]

    @classmethod
    def parse(cls, text: str) -> Instruction:
        m = re.fullmatch(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
        if not m:
            raise RefusedError(text)
        name, *words = m[2].split(".")
        return cls(text, m[1] or "", name, words, split(m[3]))

    def take(self, *choices: str) -> str:
        """The one of these words that the instruction has, or ""; it counts as understood."""
        for word in choices:
            if word in self.words:
                self.words.remove(word)
                return word
        return ""

    def need(self, *choices: str) -> str:
        return self.take(*choices) or self.refuse()

    def type(self) -> str:
        """The last word, which must be a type."""
        if not self.words or self.words[-1] not in WIDTH:
            self.refuse()
        return self.words.pop()

    def refuse(self) -> str:
        raise RefusedError(self.text)


def split(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            parts.append(text[last:i].strip())
            last = i + 1
    tail = text[last:].strip()
    return [*parts, tail] if tail else parts


def statements(text: str) -> list[str]:
    """A body's statements without their semicolons, labels with their colon, and braces of blocks."""
    out, at = [], 0
    token = re.compile(r"\s*(?:([{}])|([$\w]+\s*:)(?!:)|([^;]*);)")
    while text[at:].strip():
        m = token.match(text, at)
        if not m:
            raise RefusedError(text[at : at + 80].strip())
        out.append(next(part for part in m.groups() if part is not None).strip())
        at = m.end()
    return [s for s in out if s]


@dataclass
class Variable:
    space: str
    align: int
    type: str
    name: str
    count: int
    value: str = ""

    @property
    def bytes(self) -> int:
        return self.count * max(WIDTH[self.type], 8) // 8


DECLARED = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|global|const|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)(\[\d*\])?(?:\s*=\s*(.*))?",
    re.S,
)


def declared(text: str) -> Variable | None:
    m = DECLARED.fullmatch(text.strip())
    if not m:
        return None
    count = 1 if m[5] is None else int(m[5][1:-1] or 0)
    return Variable(m[1], int(m[2] or WIDTH[m[3]] // 8), m[3], m[4], count, m[6] or "")


@dataclass
class Module:
    text: str
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # what could not be translated, and how often
    opcodes: dict[str, Counter[str]] = field(default_factory=dict)  # of each kernel

    def __post_init__(self) -> None:
        text = re.sub(
            r"/\*.*?\*/|//[^\n]*|^\.(version|target|address_size)[^\n]*", "", self.text, flags=re.S | re.M
        )
        at = 0
        while text[at:].strip():
            head = re.compile(r"\s*((?:\([^()]*\)|[^;{(])*?)(;|\{)", re.S).match(text, at)
            if not head:
                raise RefusedError(text[at : at + 80].strip())
            is_function = re.search(r"\.(entry|func)\b", head[1])
            if is_function and head[2] == "{":
                end = text.index("\n}", head.end())
                self.functions.append(Function(self, head[1], text[head.end() : end]))
                at = end + 2
                continue
            if not is_function:
                end = text.index(";", at)
                variable = declared(text[at:end])
                if not variable:
                    raise RefusedError(text[at:end].strip())
                self.variables[variable.name] = variable
                at = end + 1
                continue
            at = head.end()  # a function that is defined elsewhere in the module


def symbol(name: str) -> str:
    return "v_" + re.sub(r"\W", "_", name)


def host_name(name: str) -> str:
    """The mangled name as the C++ compiler makes it: nvcc calls a file's unnamed namespace after the file."""
    out, at = "", 0
    for m in re.finditer(r"(\d+)_GLOBAL__N__", name):
        if m.start() < at:
            continue
        out += name[at : m.start()] + "12_GLOBAL__N_1"
        at = m.start() + len(m[1]) + int(m[1])
    return out + name[at:]


class Function:
    """An entry becomes extern "C" void k_NAME(const unsigned char *P). Another function becomes
    void(result, argument, argument ...), all of them pointers to bytes."""

    def __init__(self, module: Module, head: str, body: str) -> None:
        self.module, self.body = module, body
        m = re.search(r"\.(entry|func)\s*(?:\(([^()]*)\))?\s*([\w$]+)\s*(?:\(([^()]*)\))?", head)
        if not m:
            raise RefusedError(head)
        self.is_entry, self.name = m[1] == "entry", m[3]
        self.host_name = host_name(self.name)
        self.parameters: dict[str, str] = {}
        arguments = [v for v in map(declared, split(m[4] or "")) if v]
        if self.is_entry:
            at = 0
            for v in arguments:
                at = -(-at // v.align) * v.align
                self.parameters[v.name] = f"(P + {at})"
                at += v.bytes
            self.head = f'extern "C" void k_{self.host_name}(const unsigned char *P)'
            return
        if m[2] and (result := declared(m[2])):
            self.parameters[result.name] = "R"
        self.parameters |= {v.name: f"A{i}" for i, v in enumerate(arguments)}
        places = "".join(f", const unsigned char *A{i}" for i in range(len(arguments)))
        self.head = f"static void {symbol(self.name)}(unsigned char *R{places})"

    def translate(self) -> str:
        self.shared: dict[str, int] = {}
        self.top = STATIC
        self.bytes: set[str] = set()  # local variables and parameters of calls: arrays of bytes
        self.scopes: list[dict[str, int]] = [
            {}
        ]  # registers: how many, or -1 where the name is one register's
        for v in self.module.variables.values():
            if v.space == "shared":
                self.share(v)
        out = [self.head + " {", "unsigned char *const S = (unsigned char *)emulate::dynamic_shared();"]
        code: list[str] = []
        for s in statements(self.body):
            if s in "{}":
                code.append(s)
                self.scopes = [*self.scopes, {}] if s == "{" else self.scopes[:-1]
            elif s.endswith(":"):
                code.append(f"{symbol(s[:-1].strip())}:;")
            elif s.startswith(".reg"):
                is_range = self.registers(s)
                (out if is_range else code).append(is_range or self.register(s))
            elif s.startswith("."):
                code.append(self.directive(s))
            else:
                code.append(self.instruction(s))
        return "\n".join([*out, *code, "}"])

    # ---- declarations

    def share(self, v: Variable) -> None:
        if not v.count:
            self.shared[v.name] = 0  # dynamic
            return
        self.top = -(-self.top // v.align) * v.align
        self.shared[v.name] = self.top
        self.top += v.bytes
        if self.top > STATIC_END:
            raise RefusedError(f"{self.name}: more static shared memory than a block has")

    def registers(self, s: str) -> str:
        """`.reg .b32 %r<35>`, or ""."""
        m = re.fullmatch(r"\.reg\s+\.(\w+)\s+%(\w+)<(\d+)>", s)
        if not m:
            return ""
        self.scopes[-1]["%" + m[2]] = int(m[3])
        return f"{WORD[WIDTH[m[1]]]} {m[2]}[{m[3]}] = {{}};"

    def register(self, s: str) -> str:
        m = re.fullmatch(r"\.reg\s+\.(\w+)\s+([%\w$,\s]+)", s)
        if not m:
            raise RefusedError(s)
        names = [n.strip() for n in m[2].split(",")]
        self.scopes[-1].update(dict.fromkeys(names, -1))
        return f"{WORD[WIDTH[m[1]]]} " + ", ".join(map(symbol, names)) + ";"

    def directive(self, s: str) -> str:
        if re.match(r"\.(pragma|loc|file|branchtargets)\b", s):
            return ""
        v = declared(s)
        if not v or v.space not in ("shared", "local", "param"):
            raise RefusedError(s)
        if v.space == "shared":
            self.share(v)
            return ""
        self.bytes.add(v.name)
        return f"alignas({max(v.align, 8)}) unsigned char {symbol(v.name)}[{v.bytes}];"

    def instruction(self, s: str) -> str:
        counted = self.module.opcodes.setdefault(self.name, Counter())
        try:
            i = Instruction.parse(s)
            counted[".".join([i.name, *i.words])] += 1
            rule = RULES.get(i.name)
            if not rule:
                i.refuse()
            code = rule(self, i)
            if i.words:
                i.refuse()
            return f"if ({self.condition(i.guard)}) {{ {code} }}" if i.guard else code
        except RefusedError as e:
            why = s if str(e) in s else f"{s}: {e}"
            self.module.refused[why] += 1
            return f'ptx_refused("{why}");'

    # ---- operands

    def condition(self, guard: str) -> str:
        return ("!" if guard[0] == "!" else "") + self.register_of(guard.lstrip("!"))

    def register_of(self, operand: str) -> str:
        m = re.fullmatch(r"(%[a-zA-Z_]+)(\d+)", operand)
        for scope in reversed(self.scopes):
            if operand in scope:
                return symbol(operand)
            if m and int(m[2]) < scope.get(m[1], 0):
                return f"{m[1][1:]}[{m[2]}]"
        raise RefusedError(operand)

    def bits(self, operand: str, width: int) -> str:
        """An operand as an unsigned word."""
        if operand in SPECIAL:
            return SPECIAL[operand]
        if operand.startswith("%"):
            return self.register_of(operand)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return f"0x{operand[2:]}u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return f"0x{operand[2:]}ull"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return f"(({WORD[width]}){int(operand.rstrip('U'), 0) & (1 << 64) - 1}ull)"
        return self.address_of(operand)

    def value(self, operand: str, type_: str) -> str:
        """An operand in the type that it is computed in; a register may be wider."""
        word = self.bits(operand, WIDTH[type_])
        if is_float(type_):
            return f"{type_}_of({word})"
        return word if type_ == "pred" else f"({c_type(type_)})({word})"

    def set(self, operand: str, value: str, type_: str) -> str:
        """Stores a value of a type: floats as their bits, integers extended to the register's width."""
        if operand == "_":
            return f"(void)({value});"
        if is_float(type_):
            value = f"bits_of({value})"
        elif type_ != "pred":
            value = f"({c_type(type_)})({value})"
        return f"{self.register_of(operand)} = {value};"

    def place(self, name: str) -> str:
        if name in self.parameters:
            return self.parameters[name]
        if name in self.bytes:
            return symbol(name)
        if name in self.shared:
            return f"(S + {self.shared[name]})"
        if name in self.module.variables:
            return f"((unsigned char *){symbol(name)})"
        raise RefusedError(f"an address of {name}")

    def address_of(self, operand: str) -> str:
        """A name's address as a number: of shared memory its offset."""
        name, _, offset = operand.partition("+")
        if name in self.shared:
            return f"({self.shared[name]}u + {int(offset or 0)})"
        return f"((uint64_t){self.place(name)} + {int(offset or 0)})"

    def memory(self, operand: str, space: str) -> str:
        """`[%rd1+8]`, `[name+8]`: a pointer to bytes."""
        m = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if not m:
            raise RefusedError(operand)
        if not m[1].startswith("%"):
            return f"({self.place(m[1])} + {int(m[2] or 0)})"
        start = self.register_of(m[1])
        if space == "shared":
            return f"(S + (uint32_t)({start} + ({int(m[2] or 0)})))"
        return f"((unsigned char *)({start} + ({int(m[2] or 0)}ll)))"


# ---- instructions ----------------------------------------------------------------------------------------

Rule = Callable[[Function, Instruction], str]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def keep(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, f))
        return f

    return keep


@rule("add", "sub", "mul")
def arithmetic(f: Function, i: Instruction) -> str:
    t = i.type()
    sign = {"add": "+", "sub": "-", "mul": "*"}[i.name]
    if is_float(t):
        i.need("rn")  # else the compiler may contract it
        return f.set(
            i.operands[0], f"ptx_nan({f.value(i.operands[1], t)} {sign} {f.value(i.operands[2], t)})", t
        )
    if i.name != "mul":
        return f.set(
            i.operands[0], f"{f.bits(i.operands[1], WIDTH[t])} {sign} {f.bits(i.operands[2], WIDTH[t])}", t
        )
    return product(f, i, t, "")


@rule("mad")
def multiply_add(f: Function, i: Instruction) -> str:
    t = i.type()
    if is_float(t):
        i.refuse()
    return product(f, i, t, i.operands[3])


def product(f: Function, i: Instruction, t: str, plus: str) -> str:
    part, width = i.need("lo", "hi", "wide"), WIDTH[t]
    a, b = (f.value(x, t) for x in i.operands[1:3])
    full = ("" if t[0] == "s" else "unsigned ") + "__int128"
    to = t[0] + str(2 * width) if part == "wide" else t
    value = f"(({full}){a} * ({full}){b})" + (f" >> {width}" if part == "hi" else "")
    value = f"({c_type('u' + to[1:])})({value})"
    return f.set(i.operands[0], value + (f" + {f.bits(plus, WIDTH[to])}" if plus else ""), to)


@rule("fma")
def fused(f: Function, i: Instruction) -> str:
    t = i.type()
    i.need("rn")
    return f.set(i.operands[0], "ptx_nan(fma(" + ", ".join(f.value(x, t) for x in i.operands[1:4]) + "))", t)


@rule("div", "rem")
def divide(f: Function, i: Instruction) -> str:
    t = i.type()
    a, b = (f.value(x, t) for x in i.operands[1:3])
    if not is_float(t):
        return f.set(i.operands[0], f"ptx_{i.name}<{c_type(t)}>({a}, {b})", t)
    if i.name == "rem":
        i.refuse()
    i.need("rn")
    return f.set(i.operands[0], f"ptx_nan({a} / {b})", t)


@rule("rcp", "sqrt")
def root(f: Function, i: Instruction) -> str:
    t = i.type()
    i.need("rn")
    x = f.value(i.operands[1], t)
    return f.set(i.operands[0], f"ptx_nan({'std::sqrt(' + x + ')' if i.name == 'sqrt' else '1 / ' + x})", t)


@rule("neg", "abs")
def sign(f: Function, i: Instruction) -> str:
    t = i.type()
    if is_float(t):
        top = f"({WORD[WIDTH[t]]})1 << {WIDTH[t] - 1}"
        x = f.bits(i.operands[1], WIDTH[t])
        return f"{f.register_of(i.operands[0])} = {x} {'^ (' if i.name == 'neg' else '& ~('}{top});"
    x = f.value(i.operands[1], t)
    return f.set(
        i.operands[0], f"0 - (uint64_t){x}" if i.name == "neg" else f"{x} < 0 ? 0 - (uint64_t){x} : {x}", t
    )


@rule("min", "max")
def least(f: Function, i: Instruction) -> str:
    t = i.type()
    a, b = (f.value(x, t) for x in i.operands[1:3])
    return f.set(i.operands[0], f"ptx_{i.name}<{c_type(t)}>({a}, {b})", t)


@rule("and", "or", "xor", "not")
def logic(f: Function, i: Instruction) -> str:
    t = i.type()
    words = [f.bits(x, WIDTH[t]) for x in i.operands[1:]]
    if i.name == "not":
        return f.set(i.operands[0], ("!" if t == "pred" else "~") + words[0], t)
    return f.set(
        i.operands[0], f" {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[i.name]} ".join(words), t
    )


@rule("shl", "shr")
def shift(f: Function, i: Instruction) -> str:
    t = i.type()
    return f.set(
        i.operands[0],
        f"ptx_{i.name}<{c_type(t)}>({f.value(i.operands[1], t)}, {f.bits(i.operands[2], 32)})",
        t,
    )


@rule("shf")
def funnel(f: Function, i: Instruction) -> str:
    left, wraps = i.need("l", "r") == "l", i.need("wrap", "clamp") == "wrap"
    t = i.type()
    low, high, by = (f.bits(x, 32) for x in i.operands[1:4])
    by = f"({by} & 31u)" if wraps else f"ptx_min<uint32_t>({by}, 32)"
    both = f"((uint64_t){high} << 32 | {low})"
    return f.set(i.operands[0], f"({both} << {by}) >> 32" if left else f"{both} >> {by}", t)


@rule("lop3")
def table(f: Function, i: Instruction) -> str:
    t = i.type()
    a, b, c = (f.bits(x, 32) for x in i.operands[1:4])
    return f.set(i.operands[0], f"ptx_lop3({a}, {b}, {c}, {int(i.operands[4], 0)})", t)


@rule("popc", "clz", "bfind", "brev")
def scan(f: Function, i: Instruction) -> str:
    shifted, t = i.take("shiftamt"), i.type()
    name = "shiftamt" if shifted else i.name
    return f.set(
        i.operands[0], f"ptx_{name}<{c_type(t)}>({f.value(i.operands[1], t)})", t if name == "brev" else "u32"
    )


@rule("bfi")
def insert(f: Function, i: Instruction) -> str:
    t = i.type()
    a, b = (f.bits(x, WIDTH[t]) for x in i.operands[1:3])
    at, length = (f.bits(x, 32) for x in i.operands[3:5])
    return f.set(i.operands[0], f"ptx_bfi<{c_type(t)}>({a}, {b}, {at}, {length})", t)


@rule("bfe")
def extract(f: Function, i: Instruction) -> str:
    t = i.type()
    at, length = (f.bits(x, 32) for x in i.operands[2:4])
    return f.set(i.operands[0], f"ptx_bfe<{c_type(t)}>({f.value(i.operands[1], t)}, {at}, {length})", t)


@rule("prmt")
def permute(f: Function, i: Instruction) -> str:
    t = i.type()
    return f.set(i.operands[0], "ptx_prmt(" + ", ".join(f.bits(x, 32) for x in i.operands[1:4]) + ")", t)


COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip


@rule("setp")
def compare(f: Function, i: Instruction) -> str:
    t = i.type()
    unordered = [c + "u" for c in ("eq", "ne", "lt", "le", "gt", "ge")] if is_float(t) else []
    how = i.need(*COMPARE, *unordered, *(("nan", "num") if is_float(t) else ()))
    also = i.take("and", "or", "xor")
    a, b = (f.value(x, t) for x in i.operands[1:3])
    if how in ("nan", "num"):
        value = f"{'!' if how == 'num' else ''}ptx_unordered({a}, {b})"
    elif how.endswith("u"):
        value = f"(ptx_unordered({a}, {b}) || {a} {COMPARE[how[:-1]]} {b})"
    elif is_float(t):
        value = f"(!ptx_unordered({a}, {b}) && {a} {COMPARE[how]} {b})"
    else:
        value = f"({a} {COMPARE[how]} {b})"
    yes, *no = i.operands[0].split("|")
    mixed = (
        f" {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[also]} {f.condition(i.operands[3])}"
        if also
        else ""
    )
    code = f"const bool is = {value}; " + f.set(yes, f"is{mixed}", "pred")
    return "{ " + code + (f.set(no[0], f"!is{mixed}", "pred") if no else "") + " }"


@rule("selp")
def select(f: Function, i: Instruction) -> str:
    t = i.type()
    a, b = (f.bits(x, WIDTH[t]) for x in i.operands[1:3])
    return f"{f.register_of(i.operands[0])} = {f.condition(i.operands[3])} ? {a} : {b};"


@rule("mov")
def move(f: Function, i: Instruction) -> str:
    width = WIDTH[i.type()]
    to, of = i.operands
    if to.startswith("{"):
        parts = split(to[1:-1])
        each = width // len(parts)
        moves = [
            f"{f.register_of(p)} = ({WORD[each]})(x >> {each * k});" for k, p in enumerate(parts) if p != "_"
        ]
        return "{ const uint64_t x = " + f.bits(of, width) + "; " + " ".join(moves) + " }"
    if of.startswith("{"):
        parts = split(of[1:-1])
        each = width // len(parts)
        words = [f"(uint64_t)({WORD[each]}){f.bits(p, each)} << {each * k}" for k, p in enumerate(parts)]
        return f"{f.register_of(to)} = {' | '.join(words)};"
    return f"{f.register_of(to)} = {f.bits(of, width)};"


@rule("cvta")
def convert_address(f: Function, i: Instruction) -> str:
    back, space = i.take("to"), i.need("global", "shared", "param", "const", "local")
    i.type()
    x = f.bits(i.operands[1], 64)
    base = "0" if space != "shared" else "(uint64_t)S"
    return f"{f.register_of(i.operands[0])} = {x} {'-' if back else '+'} {base};"


ROUNDS = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@rule("cvt")
def convert(f: Function, i: Instruction) -> str:
    of, to = i.type(), i.type()
    halves = ("f16", "bf16", "f16x2", "bf16x2")
    if to in halves:
        if of != "f32":
            i.refuse()
        i.need("rn")
        words = [f"ptx_{to.removesuffix('x2')}({f.value(x, 'f32')})" for x in i.operands[1:]]
        return f.set(
            i.operands[0],
            words[0] if len(words) == 1 else f"(uint32_t){words[0]} << 16 | {words[1]}",
            f"u{WIDTH[to]}",
        )
    x = f"ptx_of_{of}({f.bits(i.operands[1], 16)})" if of in halves else f.value(i.operands[1], of)
    if is_float(to) and not is_float(of) and of not in halves:
        i.need("rn")
        return f.set(i.operands[0], f"({c_type(to)}){x}", to)
    if is_float(to):
        how = i.take(*ROUNDS) if to == of else ""
        if to == "f32" and of == "f64":
            i.need("rn")
        value = f"std::{ROUNDS[how]}({x})" if how else f"({c_type(to)}){x}"
        return f.set(i.operands[0], f"ptx_nan({value})", to)
    if is_float(of):
        value = f"std::{ROUNDS[i.need(*ROUNDS)]}({x})"
        has_top = "true" if 64 in (WIDTH[of], WIDTH[to]) else "false"
        return f.set(i.operands[0], f"ptx_integer<{c_type(to)}>({value}, {has_top})", to)
    return f.set(i.operands[0], f"ptx_saturated<{c_type(to)}>({x})" if i.take("sat") else x, to)


SPACES = ("global", "shared", "param", "local", "const")


def elements(i: Instruction, operand: str) -> list[str]:
    count = int((i.take("v2", "v4") or "v1")[1])
    parts = split(operand[1:-1]) if count > 1 else [operand]
    if len(parts) != count:
        i.refuse()
    return parts


@rule("ld")
def load(f: Function, i: Instruction) -> str:
    t, space = i.type(), i.take(*SPACES)
    i.take("cs", "ca", "cg", "lu", "nc")  # how to cache it
    acquires = i.take("acquire")
    if i.take("relaxed", "volatile") or acquires:
        i.take("gpu", "sys", "cta")
    parts, at = elements(i, i.operands[0]), f.memory(i.operands[1], space)
    width = WIDTH[t] // 8
    kind = "uint" + t[1:] + "_t" if is_float(t) else c_type(t)
    look = (
        ""
        if space in ("param", "local")
        else f"ptx_reads<{width * len(parts)}, {str(bool(acquires)).lower()}>(at);"
    )
    words = " ".join(f"const {kind} x{k} = ptx_get<{kind}>(at + {width * k});" for k in range(len(parts)))
    moves = " ".join(f"{f.register_of(p)} = x{k};" for k, p in enumerate(parts) if p != "_")
    return f"{{ const unsigned char *const at = {at}; {look} {words} {moves} }}"


@rule("st")
def store(f: Function, i: Instruction) -> str:
    t, space = i.type(), i.take(*SPACES)
    i.take("cs", "wb", "cg", "wt")
    if i.take("relaxed", "volatile"):
        i.take("gpu", "sys", "cta")
    parts, at = elements(i, i.operands[1]), f.memory(i.operands[0], space)
    width, kind = WIDTH[t] // 8, WORD[WIDTH[t]]
    look = "" if space in ("param", "local") else f"ptx_writes<{width * len(parts)}>(at);"
    moves = " ".join(
        f"ptx_put<{kind}>(at + {width * k}, ({kind})({f.bits(p, WIDTH[t])}));" for k, p in enumerate(parts)
    )
    return f"{{ unsigned char *const at = {at}; {look} {moves} }}"


@rule("atom", "red")
def atomic(f: Function, i: Instruction) -> str:
    t, space = i.type(), i.take("global", "shared")
    releases = "emulate::fence(); " if i.take("release", "acq_rel") else ""
    i.take("relaxed")
    i.take("gpu", "cta", "sys")
    how = i.need("add", "min", "max", "and", "or", "xor", "exch", "cas")
    if is_float(t):
        i.refuse()
    operands = i.operands if i.name == "atom" else ["_", *i.operands]
    values = ", ".join(f.value(x, t) for x in operands[2:])
    return releases + f.set(
        operands[0], f"ptx_atomic_{how}<{c_type(t)}>({f.memory(operands[1], space)}, {values})", t
    )


@rule("membar", "fence")
def fence(f: Function, i: Instruction) -> str:
    i.words.clear()
    return "emulate::fence();"


@rule("bar", "barrier")
def barrier(f: Function, i: Instruction) -> str:
    i.take("cta")
    if i.take("warp"):
        i.need("sync")
        return f"emulate::meet(emulate::SYNC_WARP, 0, 0, {f.bits(i.operands[0], 32)});"
    if i.take("red"):
        how, _ = i.need("or", "popc"), i.need("pred", "u32")
        if i.operands[1] != "0" or len(i.operands) != 3:
            i.refuse()
        kind, t = ("BARRIER_OR", "pred") if how == "or" else ("BARRIER_COUNT", "u32")
        met = f"emulate::meet(emulate::{kind}, {f.condition(i.operands[2])}, 0)"
        return f.set(i.operands[0], met + (" != 0" if t == "pred" else ""), t)
    i.need("sync")
    if i.operands != ["0"]:
        i.refuse()
    return "emulate::meet(emulate::BARRIER, 0, 0);"


@rule("shfl")
def shuffle(f: Function, i: Instruction) -> str:
    """Of whole warps: what it gives beyond the first or the last lane is the lane's own word, and says so."""
    i.need("sync")
    how, _ = i.need("bfly", "up", "idx"), i.need("b32")
    to, of, by, bounds, mask = i.operands
    whole = "0" if how == "up" else "31"
    if bounds != whole and not bounds.startswith("%"):
        i.refuse()
    check = (
        ""
        if bounds == whole
        else f'if ({f.bits(bounds, 32)} != {whole}) ptx_refused("a shuffle of part of a warp"); '
    )
    to, *inside = to.split("|")
    kind = {"bfly": "SHUFFLE_XOR", "up": "SHUFFLE_UP", "idx": "SHUFFLE"}[how]
    words = check + f"const uint32_t by = {f.bits(by, 32)} & 31u;"
    words += f" const bool within = {'threadIdx.x % 32u >= by' if how == 'up' else 'true'}; (void)within; "
    words += f.set(to, f"emulate::meet(emulate::{kind}, {f.bits(of, 32)}, by, {f.bits(mask, 32)})", "b32")
    return "{ " + words + (f.set(inside[0], "within", "pred") if inside else "") + " }"


@rule("vote")
def vote(f: Function, i: Instruction) -> str:
    i.need("sync")
    how, t = i.need("ballot", "any", "all"), i.need("b32", "pred")
    ask = ("!" if how == "all" else "") + f"({f.condition(i.operands[1])})"
    met = f"emulate::meet(emulate::BALLOT, {ask}, 0, {f.bits(i.operands[2], 32)})"
    return f.set(i.operands[0], met + {"ballot": "", "any": " != 0", "all": " == 0"}[how], t)


@rule("redux")
def reduce(f: Function, i: Instruction) -> str:
    i.need("sync")
    how, t = i.need("add", "min", "max", "and", "or", "xor"), i.type()
    of, mask = f.value(i.operands[1], t), f.bits(i.operands[2], 32)
    word = f"ptx_redux<{c_type(t)}>(ptx_redux_{how}<{c_type(t)}>, {of}, {mask})"
    return f.set(i.operands[0], word, t)


@rule("bra")
def branch(f: Function, i: Instruction) -> str:
    i.take("uni")
    return f"goto {symbol(i.operands[0])};"


@rule("ret", "exit")
def leave(f: Function, i: Instruction) -> str:
    i.take("uni")
    return "return;"


@rule("trap")
def trap(f: Function, i: Instruction) -> str:
    return 'emulate::stop("trap");'


@rule("call")
def call(f: Function, i: Instruction) -> str:
    """`(retval0), name, (param0, param1)`."""
    i.take("uni")
    result = symbol(i.operands[0][1:-1].strip()) if i.operands[0].startswith("(") else "nullptr"
    name, *rest = i.operands[result != "nullptr" :]
    arguments = [symbol(a) for a in split(rest[0][1:-1])] if rest else []
    if name not in {g.name for g in f.module.functions}:
        i.refuse()
    return f"{symbol(name)}({', '.join([result, *arguments])});"


@rule("prefetch", "prefetchu", "griddepcontrol", "nanosleep", "discard")
def hint(f: Function, i: Instruction) -> str:
    """Changes no value. Whether a launch may begin early, the emulation asks at the launch."""
    i.words.clear()
    return ";"


# ---- a module --------------------------------------------------------------------------------------------


def initialised(v: Variable) -> str:
    value = re.sub(r"0[fF]([0-9A-Fa-f]{8})\b", r"0x\1", v.value)
    value = re.sub(r"0[dD]([0-9A-Fa-f]{16})\b", r"0x\1ull", value)
    if value and not value.startswith("{"):
        value = "{" + value + "}"
    word = WORD[WIDTH[v.type]]
    return f"alignas({v.align}) static {word} {symbol(v.name)}[{v.count}]{' = ' + value if value else ''};"


def translate(text: str) -> tuple[str, Module]:
    """PTX as C++, and what is known of it. Where `module.refused` is not empty, the C++ stops there."""
    module = Module(text)
    variables = [initialised(v) for v in module.variables.values() if v.space in ("global", "const")]
    plain = [g.head + ";" for g in module.functions]
    bodies = [g.translate() for g in module.functions]
    return "\n".join(['#include "ptx.h"', *variables, *plain, *bodies, ""]), module
