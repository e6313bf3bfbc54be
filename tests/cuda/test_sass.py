"""benchmarks/sass.py on a listing as nvdisasm prints it: no compiler and no CUDA tool is needed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import sass

# A pass over elements, eight a turn. R0 is a dtype, bit 2 of R1 a setting; P2 is data.
LISTING = """\
	.headerflags	@"EF_CUDA_SM90"
	.section	.nv.info._Z1w,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_MAX_THREADS
	.align		4
        /*16f0*/ 	.byte	0x04, 0x05
        /*16f2*/ 	.short	(.L_43 - .L_42)
.L_42:
        /*16f4*/ 	.word	0x00000100
//--------------------- .text._Z1w --------------------------
	.section	.text._Z1w,"ax",@progbits
	.type	_Z1w,@function
.text._Z1w:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ISETP.GE.U32.AND P0, PT, R9, UR4, PT ;
        /*0020*/               @P0 EXIT ;
.L_x_9:
        /*0030*/                   ISETP.NE.AND P1, PT, R0, RZ, PT ;
        /*0040*/                   LDG.E.128 R12, desc[UR8][R4.64] ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        /*0060*/                   LDG.E.EF.64 R16, desc[UR8][R2.64] ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0080*/                   LDG.E.EF.128 R16, desc[UR8][R2.64] ;
        /*0090*/                   LDG.E.EF.128 R20, desc[UR8][R2.64+0x200] ;
.L_x_2:
        /*00a0*/                   LOP3.LUT R1, R1, 0xfffffffe, RZ, 0xc0, !PT ;
        /*00b0*/               @P2 LOP3.LUT R1, R1, 0x1, RZ, 0xfc, !PT ;
        /*00c0*/                   LOP3.LUT P3, RZ, R1.reuse, 0x2, RZ, 0xc0, !PT ;
        /*00d0*/               @P3 BRA `(.L_x_3) ;
        /*00e0*/                   FADD R16, R16, -R12 ;
        /*00f0*/                   FADD R17, R17, -R13 ;
.L_x_3:
        /*0100*/                   FSETP.GT.AND P2, PT, R16, R17, PT ;
        /*0110*/                   BSSY B0, `(.L_x_5) ;
        /*0120*/               @P2 BRA `(.L_x_4) ;
        /*0130*/                   BRA.DIV UR4, `(.L_x_7) ;
        /*0140*/                   BRA `(.L_x_4) ;
.L_x_7:
        /*0150*/                   WARPSYNC R40 ;
        /*0160*/                   BRA `(.L_x_4) ;
.L_x_4:
        /*0170*/                   BSYNC B0 ;
.L_x_5:
        /*0180*/                   ISETP.GE.U32.AND P4, PT, R16, 0x7, PT ;
        /*0190*/               @P4 BRA `(.L_x_6) ;
        /*01a0*/                   STG.E [R6.64], R16 ;
        /*01b0*/                   STL [R1+0x4], R16 ;
        /*01c0*/                   BRA `(.L_x_8) ;
.L_x_6:
        /*01d0*/                   STG.E.128 desc[UR8][R4.64], R16 ;
        /*01e0*/                   STG.E.128 desc[UR8][R4.64+0x200], R20 ;
.L_x_8:
        /*01f0*/                   IADD3 R9, R9, 0x2, RZ ;
        /*0200*/                   ISETP.GE.U32.AND P0, PT, R9, UR4, PT ;
        /*0210*/              @!P0 BRA `(.L_x_9) ;
        /*0220*/                   EXIT ;
.L_x_10:
        /*0230*/                   BRA `(.L_x_10);
"""
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1w' for 'sm_90'
ptxas info    : Function properties for _Z1w
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 8 bytes cumulative stack size, 264 bytes smem
ptxas info    : Compile time = 12.5 ms
ptxas info    : Compiling entry function '_Z1v' for 'sm_90'
ptxas info    : Used 14 registers, used 0 barriers
"""


def test_a_loop() -> None:
    ((name, lines),) = sass.functions(LISTING)
    assert name == "_Z1w"
    (row,) = sass.passes_of("x.cu sid_pass_kernel<memory1, x>", lines)
    assert (row["loop"], row["elements"], row["vector"]) == (".L_x_9", 8, 16)
    # head 3, both loads 2, packing 4, probe 3, BSYNC 1, stores' test 2, stores 2, end 3; the setting 2 more
    assert (row["cheap"], row["dear"]) == (20 / 8, 22 / 8)
    assert (row["loaded"], row["stored"]) == (48 / 8, 32 / 8)
    assert row["all"] == ((0x210 - 0x30) / 16 + 1 - 2) / 8  # from head to end but for BRA.DIV's way
    assert row["local"] == 1


def test_no_loop_is_said() -> None:
    lines = [line for line in dict(sass.functions(LISTING))["_Z1w"] if ".L_x_9)" not in line]
    assert sass.passes_of("x.cu sid_pass_kernel<memory1, x>", lines) == [
        {"kernel": "x.cu sid_pass_kernel<memory1, x>", "pass": "encode"}
    ]
    assert sass.passes_of("x.cu sid_check_kernel", lines) == []


def test_loops_within_loops() -> None:
    code = ["/*00*/ MOV R0, R1 ;", ".L_x_1:", "/*10*/ IADD3 R2, R2, 0x1, RZ ;", ".L_x_2:",
            "/*20*/ LDG.E R3, [R4] ;", "/*30*/ @P0 BRA `(.L_x_2) ;", "/*40*/ @P1 BRA `(.L_x_1) ;",
            "/*50*/ EXIT ;"]  # fmt: skip
    blocks = sass.blocks_of(code)
    assert [b.to for b in blocks[:4]] == [[1], [2], [2, 3], [1, 4]]
    assert {(loop.head, tuple(sorted(loop.body))) for loop in sass.loops_of(blocks)} == {
        (1, (1, 2, 3)),
        (2, (2,)),
    }
    assert sass.innermost(blocks, sass.loops_of(blocks), r"LDG\.E") == sass.Loop(2, frozenset({2}))


def test_a_jump_table() -> None:
    code = ["/*00*/ LDC R2, c[0x2][R1] ;", '/*10*/ BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_1,.L_x_2,.L_x_1"*);',
            ".L_x_1:", "/*20*/ EXIT ;", ".L_x_2:", "/*30*/ EXIT ;"]  # fmt: skip
    assert [sorted(set(b.to)) for b in sass.blocks_of(code)[:3]] == [[1, 2], [], []]


def test_what_ptxas_says() -> None:
    none = {"shared": 0, "stack": 0, "spilled": 0, "refilled": 0}
    assert sass.resources_of(LOG) == {
        "_Z1w": {"registers": 80, "shared": 264, "stack": 8, "spilled": 4, "refilled": 12},
        "_Z1v": {"registers": 14, **none},
    }
    assert sass.threads_of(LISTING) == {"_Z1w": 256}


@pytest.mark.parametrize(
    "arch, threads, registers, shared, blocks",
    [  # by warps, by blocks, by registers, by shared memory
        (90, 1024, 32, 0, 2), (90, 64, 16, 0, 32), (90, 256, 64, 0, 4), (90, 256, 65, 0, 3),
        (90, 256, 128, 0, 2), (90, 256, 32, 37 << 10, 6), (80, 256, 32, 40 << 10, 4), (86, 256, 32, 0, 6),
        (75, 256, 64, 0, 4), (120, 128, 40, 8 << 10, 11), (75, 256, 32, 32 << 10, 2),
    ],
)  # fmt: skip
def test_occupancy(arch: int, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert sass.occupancy(arch, threads, registers, shared) == blocks


def test_names() -> None:
    assert sass.short(
        "void sid_pass_kernel<sid_memory1, sid_gathering<(anonymous namespace)::topk> >(int)"
    ) == ("sid_pass_kernel<memory1, gathering<topk> >")
    codec = "(anonymous namespace)::coder<true, (sid_rounding)1>"
    long = f"sid_tile_kernel<sid_memory0, {codec}, false, sid_no_seal>(x)"
    assert sass.short(long) == "sid_tile_kernel<memory0, coder<true, 1>, false, no_seal>"
    assert sass.short("(anonymous namespace)::sid_seal_kernel(sid_ending)") == "sid_seal_kernel"
    long = "sid_look_kernel<(anonymous namespace)::body<((anonymous namespace)::content)3> >(x)"
    assert sass.short(long) == "sid_look_kernel<body<3> >"
