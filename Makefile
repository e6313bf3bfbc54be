# Flags and rules of the C core, and the commands for people. setup.py finds nvcc and calls `make ext`.
# Variables: PYTHON=... CC=clang CXX=clang++ WERROR=1 DEBUG=1 SAN=address,undefined TORCH=torch==X ARGS="..." RUNS=N
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := all

ifeq ($(origin CC),default)
CC := cc
endif
ifeq ($(origin CXX),default)
CXX := c++
endif
$(foreach v,DEBUG WERROR ALL,$(eval override $v := $(filter-out 0,$($v)))) # 0 is as good as nothing
O       ?= build/obj
OUT     ?= build/_core.so
NVCC    ?=
GENCODE ?=

# ---- the extension and the core ---------------------------------------------------------------------------------

comma    = ,
OPT      = $(if $(DEBUG),-O1 -g,-O3 -DNDEBUG)
WARN     = -Wall -Wextra -Wshadow -Wconversion $(if $(WERROR),-Werror)
SANFLAGS = $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer)
COMMON   = $(OPT) -fPIC -fvisibility=hidden -ffp-contract=off $(WARN) $(SANFLAGS) -Icsrc
CUDADEF  = $(if $(NVCC),-DSID_WITH_CUDA '-DSID_CUDA_ARCH="$(ARCH)"')
C        = $(CC) -std=c11 $(COMMON) -Wpedantic -Wstrict-prototypes -Wmissing-prototypes -Wdouble-promotion $(CUDADEF) $(CFLAGS)
# -O1: the binding only forwards calls, and pybind11 is slow to compile.
# Under sanitizers it has no UBSan and is not optimized: else it takes most of such a build's time.
CPP      = $(CXX) -std=c++17 $(subst $(comma)undefined,,$(COMMON)) $(if $(SAN),-O0,-O1) $(CUDADEF) $(CXXFLAGS)
CU       = $(NVCC) -std=c++17 -O3 -fmad=false -t 0 $(GENCODE) -Icsrc $(CUDADEF) \
           -Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra \
           $(if $(WERROR),-Werror=all-warnings -Xcompiler=-Werror) $(NVCCFLAGS)
# nvcc has other names for what is for the linker or for the compiler that it calls.
NVLD     = $(patsubst -Wl$(comma)%,-Xlinker %,$(patsubst -f%,-Xcompiler -f%,$(LDFLAGS)))
LD       = $(if $(NVCC),$(NVCC) -shared -cudart static $(firstword $(GENCODE)) $(NVLD),$(CXX) -shared $(SANFLAGS) $(LDFLAGS))
LIBS     = -ldl -lm
# An extension for macOS leaves Python's symbols to the process that loads it.
DARWIN  := $(filter %darwin %macos,$(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null | sed 's/[0-9.]*$$//')))
UNDEF    = $(if $(DARWIN),-undefined dynamic_lookup)

# csrc/isa/simd.c is compiled once per instruction set; elsewhere than on x86-64 there is only the base.
# -Wno-psabi: its vector types never cross a call, so how they would be passed does not matter.
X86     := $(findstring x86_64,$(shell $(CC) -dumpmachine 2>/dev/null))
CSRC    := $(sort $(wildcard csrc/core/*.c csrc/codec/*.c csrc/memory/*.c csrc/fusion/*.c csrc/exchange/*.c csrc/delta/*.c))
COBJ     = $(CSRC:%=$O/%.o) $O/isa/base.o $(if $(X86),$O/isa/avx2.o $O/isa/avx512.o)
CUSRC   := $(sort $(wildcard cuda/*/*.cu))
OBJ      = $(if $(NVCC),$(CUSRC:%=$O/%.o)) $O/python/binding/module.cpp.o $(COBJ) # what takes longest first

ext: $(OUT)
$(OUT): $(OBJ) $O/ld.sig
	@mkdir -p $(@D)
	$(LD) $(OBJ) $(UNDEF) $(LIBS) -o $@

# The command is kept in a file: when it changes, what it made is stale.
$O/c.sig:   SIG = $(C)
$O/cpp.sig: SIG = $(CPP)
$O/cu.sig:  SIG = $(CU)
$O/ld.sig:  SIG = $(LD) $(UNDEF) $(OBJ)
commands: $O/c.sig $O/cpp.sig $O/cu.sig $O/ld.sig # setup.py: then `make -n ext KNOWN=1` tells what will be compiled
$O/%.sig: $(if $(KNOWN),,FORCE)
	@mkdir -p $(@D); printf '%s' '$(subst ','\'',$(SIG))' | cmp -s - $@ || printf '%s' '$(subst ','\'',$(SIG))' > $@

$O/isa/base.o:   ISA = -DSID_ISA=base
$O/isa/avx2.o:   ISA = -DSID_ISA=avx2 -march=x86-64-v3
$O/isa/avx512.o: ISA = -DSID_ISA=avx512 -march=x86-64-v4 -mprefer-vector-width=512
$O/isa/%.o: csrc/isa/simd.c $O/c.sig
	@mkdir -p $(@D)
	$(C) -Wno-psabi $(ISA) -MMD -MP -c $< -o $@
$O/%.c.o: %.c $O/c.sig
	@mkdir -p $(@D)
	$(C) -MMD -MP -c $< -o $@
$O/%.cpp.o: %.cpp $O/cpp.sig
	@mkdir -p $(@D)
	$(CPP) $(PYINC) -MMD -MP -c $< -o $@
$O/%.cu.o: %.cu $O/cu.sig
	@mkdir -p $(@D)
	$(CU) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
# For `make registers`; what ptxas says beside it.
$O/%.cubin: %.cu $O/cu.sig
	@mkdir -p $(@D)
	$(CU) -Xptxas=-v -MMD -MP -MF $@.d -cubin $< -o $@ 2> $@.log || { cat $@.log >&2; rm -f $@; exit 1; }
DEPS = $(OBJ:.o=.d) $(wildcard $O/cuda/*/*.cubin.d) $(TESTOBJ:.o=.d) $(wildcard $O/tests/fuzz/*.d)
$(DEPS): ;

# ---- C tests and fuzzers, without Python --------------------------------------------------------------------------

TESTOBJ  = $(patsubst %,$O/%.o,$(sort $(wildcard tests/c/*.c)))
FUZZOBJ  = $(patsubst %,$O/tests/%.c.o,c/support c/report c/tampered c/fusion_model fuzz/subject) $(if $(LIBFUZZER),,$O/tests/fuzz/standalone.c.o)
JOBS    := $(or $(MAX_JOBS),$(shell env -u OMP_NUM_THREADS nproc 2>/dev/null),2)
SUB      = $(MAKE) -s --no-print-directory $(if $(filter 0,$(MAKELEVEL)),-j$(JOBS)) PYTHON=$(PYTHON)

$O/ctest: $(COBJ) $(TESTOBJ)
	$(C) $^ -lpthread $(LIBS) -o $@
$O/fuzz-%: $O/tests/fuzz/%.c.o $(FUZZOBJ) $(COBJ)
	$(C) $(if $(LIBFUZZER),-fsanitize=fuzzer) $^ $(LIBS) -o $@

ctest: ## the C tests of the core alone (ALL=1: every combination; ONLY="words of names"; SAN=address,undefined DEBUG=1 O=build/x CC=clang; RUN="qemu-aarch64 -L ...")
	+@$(SUB) $O/ctest
	$(RUN) $O/ctest $(if $(ALL),-a) $(ONLY)
asan: ## the C tests under AddressSanitizer and UndefinedBehaviorSanitizer
	+@$(SUB) ctest SAN=address,undefined DEBUG=1 O=build/asan-$(notdir $(CC))
tsan: ## the C tests that have threads under ThreadSanitizer
	+@$(SUB) ctest SAN=thread DEBUG=1 ONLY=threads O=build/tsan-$(notdir $(CC))

RUNS ?= 100000
# Counters only: tracing every comparison, as -fsanitize=fuzzer does, is ten times slower and finds nothing more here,
# because the harness starts from sound payloads and signs what it changed.
FUZZFLAGS = -O2 -g -fsanitize-coverage=inline-8bit-counters,pc-table
FUZZCC ?= $(if $(shell command -v clang),clang,$(CC))
fuzz: ## arbitrary bytes into decode, header checks, deltas, states and the planners (RUNS=10000000; libFuzzer where clang has it)
	@mkdir -p build/fuzz; printf '%s\n' '#include <stddef.h>' 'int LLVMFuzzerTestOneInput(const unsigned char *, size_t);' \
	    'int LLVMFuzzerTestOneInput(const unsigned char *d, size_t n) { return d == 0 && n == 0; }' > build/fuzz/probe.c
	+@if $(FUZZCC) -fsanitize=fuzzer,address build/fuzz/probe.c -o build/fuzz/probe 2>/dev/null; then \
	    $(SUB) fuzz-run LIBFUZZER=1 CC=$(FUZZCC) SAN=address,undefined CFLAGS='$(FUZZFLAGS)' O=build/fuzz/lib; \
	else echo "no libFuzzer (Debian: clang libclang-rt-14-dev): random mutations instead"; \
	    $(SUB) fuzz-run CC=$(FUZZCC) SAN=address,undefined CFLAGS='-O2 -g' O=build/fuzz/alone; fi
# exchange, fusion: a tenth of the runs, which are whole steps of all ranks, or compared with brute force. state: a fiftieth, each
# of them four steps.
fuzz-run: $O/fuzz-header $O/fuzz-decode $O/fuzz-delta $O/fuzz-exchange $O/fuzz-fusion $O/fuzz-state
	@for t in header decode delta exchange fusion state; do mkdir -p build/fuzz/corpus-$$t && runs=$(RUNS) && \
	    case $$t in exchange|fusion) runs=$$((runs / 10));; state) runs=$$((runs / 50));; esac && echo "fuzz $$t, $$runs runs" && \
	    $O/fuzz-$$t -runs=$$runs -max_len=256 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 -artifact_prefix=build/fuzz/ build/fuzz/corpus-$$t || exit 1; done

coverage: ## lines and branches of csrc/ that the C tests reach
	@rm -rf build/coverage
	+@$(SUB) ctest CC=gcc DEBUG=1 CFLAGS=--coverage O=build/coverage
	@tests/c/coverage.sh build/coverage

# ---- Python -------------------------------------------------------------------------------------------------------

# The interpreter: PYTHON=..., else .venv or python3 where it has what the tests need, else a new .venv.
TORCH ?= torch==2.13.0
BUILDS = pybind11 setuptools
NEEDS  = torch numpy rich typer pytest hypothesis matplotlib sklearn $(BUILDS)
SITE   = mkdocs material mkdocstrings_handlers ruff
HAS    = -c 'import sys, importlib.util as u; no = [m for m in sys.argv[1:] if not u.find_spec(m)]; print(*no); sys.exit(bool(no))'
ifndef PYTHON
PYTHON := $(shell for p in .venv/bin/python python3; do $$p $(HAS) $(NEEDS) >/dev/null 2>&1 && echo $$p && exit; done; echo .venv/bin/python)
# gpu-check installs nothing.
OFFLINE := $(or $(wildcard .venv/bin/python),python3)
else
GIVEN := $(PYTHON)
endif
APT    = (Debian, Ubuntu: apt-get install build-essential python3-dev python3-venv)
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))

all: env-build ## the extension in place: python/sidcomp/_core*.so
	@$(PYTHON) setup.py -q build_ext --inplace

# What is lacking goes into .venv; a Python of one's own is left as it is. To build takes less than the rest.
ensure = $(PYTHON) $(HAS) $(1) >/dev/null 2>&1 || \
    $(MAKE) --no-print-directory venv-$(if $(filter .venv/bin/python,$(PYTHON)),$(2),refuse) WANTS='$(1)'
env:
	+@$(call ensure,$(NEEDS),make)
env-build: $(if $(GIVEN),,env)
	+@$(call ensure,$(BUILDS),make)
env-docs:
	+@$(call ensure,$(SITE),docs)
venv-refuse:
	@command -v $(PYTHON) >/dev/null || { echo "sidcomp: no $(PYTHON)"; exit 1; }
	@echo "sidcomp: $(PYTHON) lacks: $$($(PYTHON) $(HAS) $(WANTS))"; \
	 echo "         install these there, or leave PYTHON out: then a .venv is made"; exit 1
# A torch that python3 has is used from where it is; the rest goes into .venv. torch first: a bare `torch>=2.4` would
# pick the newest one, CUDA libraries and all.
venv-make:
	@command -v python3 >/dev/null || { echo "sidcomp: no python3 $(APT)"; exit 1; }
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "sidcomp: $$(python3 -V) is too old: 3.10 or later is needed"; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "sidcomp: no C++ compiler $(APT)"; exit 1; }
	@python3 -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null || { echo "sidcomp: no Python.h $(APT)"; exit 1; }
	@test -x .venv/bin/pip || python3 -m venv .venv || { rm -rf .venv; echo "sidcomp: python3 -m venv failed $(APT)"; exit 1; }
	@if from=$$(python3 -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null); then \
	    echo "sidcomp: .venv uses the torch in $$from"; \
	    echo "$$from" > "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch-of-python3.pth"; \
	else echo "sidcomp: installing $(TORCH) into .venv (about 900 MB)"; .venv/bin/pip install -q '$(TORCH)'; fi
	@echo "sidcomp: installing the rest into .venv"
	@.venv/bin/pip install -q 'setuptools>=77' 'pybind11>=2.11'
	@.venv/bin/pip install -q --no-build-isolation -e '.[test,plot,examples]'

venv-docs: # neither torch nor the extension: the site is made from the sources
	@test -x .venv/bin/pip || python3 -m venv .venv || { rm -rf .venv; echo "sidcomp: python3 -m venv failed $(APT)"; exit 1; }
	@.venv/bin/pip install -q $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')

# The extension, and beside it the package's own files. What cannot be under a sanitizer, or has nothing of the core, is left out.
ASANPY   = $(CURDIR)/build/asan-python
# Some of everything that gets pointers from Python: arrays, payloads, checkpoints, ranks that exchange; and each door.
ASANDOOR = $(addprefix doors/,test_doors.py::test_with_codec_none_all_doors_give_the_same_bits test_fsdp.py::test_the_reduce_scatter \
    test_all_gather.py::test_parameters_travel_rounded) $(addprefix runtime/,test_error_in_memory.py::test_buffers_are_rank_0s \
    test_error_in_parameters.py::test_a_rank_that_is_not_finite_leaves_the_average_finite test_outer.py::test_what_is_not_finite_is_undone)
ASANSOME = $(addprefix tests/,codecs/test_compressor.py codecs/test_wire.py codecs/test_memories.py ddp/test_dense.py ddp/test_reductions.py ddp/test_checkpoint.py $(ASANDOOR))
# In a shared library clang leaves the sanitizer's functions to whoever loads it.
ASANLIB  = $(if $(findstring clang,$(CC)),libclang_rt.asan-$(shell uname -m).so,libasan.so)
ASANALL  = tests $(addprefix --ignore=tests/,package cuda/test_registers.py cuda/test_gpu_check.py)
asan-python: env ## one in 16 of some Python tests, the core under AddressSanitizer and UBSan (ALL=1: nearly all; TESTS=..., ARGS=...)
	@test -e "$$($(CC) -print-file-name=$(ASANLIB))" || { echo "sidcomp: $(CC) has no $(ASANLIB)"; exit 1; }
	@rm -rf $(ASANPY)/lib; mkdir -p $(ASANPY)/lib/sidcomp; ln -s $(filter-out %/__pycache__ %.so,$(wildcard $(CURDIR)/python/sidcomp/*)) $(ASANPY)/lib/sidcomp/
	+@$(SUB) ext SAN=address,undefined DEBUG=1 O=build/asan-$(notdir $(CC)) OUT=$(ASANPY)/_core.so \
	    PYINC="$$($(PYTHON) -c 'import sysconfig, pybind11; print("-isystem", sysconfig.get_paths()["include"], "-isystem", pybind11.get_include())')"
	@ln -s $(ASANPY)/_core.so $(ASANPY)/lib/sidcomp/_core.so
	@# With the sanitizer libstdc++, of whose exceptions it must know before Python is there.
	LD_PRELOAD="$$($(CC) -print-file-name=$(ASANLIB)) $$($(CC) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	    UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(ASANPY)/lib OMP_NUM_THREADS=1 \
	    SHARE=$(if $(ALL)$(TESTS),1,16) $(PYTHON) -m pytest -q -p no:cacheprovider -m 'not slow' $(ARGS) $(or $(TESTS),$(if $(ALL),$(ASANALL),$(ASANSOME)))

train: env all ## two ranks train: plain DDP beside sidcomp, a table and a picture (ARGS="--task digits")
	$(PYTHON) examples/launch.py $(ARGS)
test: env all ## the tests, without the slow ones (ARGS="-k topk" TESTS=tests/ddp)
	$(if $(TESTS),$(PYTHON) -m pytest -q -m 'not slow' $(ARGS) $(TESTS),PYTHON=$(PYTHON) tests/run.sh $(ARGS))
test-all: env all ## every test, the sanitizers, fuzzing with 10^7 runs each
	$(PYTHON) -m pytest -q tests
	+@$(SUB) ctest ALL=1
	+@$(SUB) asan ALL=1
	+@$(SUB) tsan
	+@$(SUB) asan-python ALL=1
	+@$(SUB) fuzz RUNS=10000000
bench-codecs: env all ## encode and decode of every codec, beside the limit and torch (ARGS="--only topk --n 2600000")
	$(PYTHON) -m benchmarks.bench_codec --n 260000 2600000 25600000 $(ARGS)
bench: env all ## the benchmarks, each with its limit and its baseline
	$(PYTHON) -m benchmarks $(ARGS)
papers: env all ## the five papers' results again, in small: two hours; goes on where it stopped (ARGS="--only cupcake")
	$(PYTHON) -m benchmarks.papers $(ARGS)
bench-planner: env all ## what the plan of each algorithm costs, on six models (ARGS="--only error")
	$(PYTHON) -m benchmarks.bench_planner $(ARGS)
bench-plan-real: env all ## every plan over real links: hours; goes on where it stopped (ARGS="--rates 1gbit --minutes 20")
	$(PYTHON) -m benchmarks.bench_plan_real $(ARGS)
figures: env-build ## the tables of figures on the pages, from benchmarks/results (ARGS=--check)
	$(PYTHON) -m benchmarks.tables $(ARGS)
registers: ## registers and spills of the CUDA kernels, as ptxas tells them; needs nvcc, no GPU (ARGS=exchange/ring.cu)
	$(PYTHON) -m benchmarks.registers $(ARGS)
gpu-check: ## on a machine with a GPU: build, test and time the CUDA kernels in nine minutes; needs no network (LEASE=2: in three more)
	$(or $(OFFLINE),$(PYTHON)) benchmarks/gpu_check.py --lease $(or $(LEASE),1) $(ARGS) || [ $$? = 77 ] # 77: no GPU here, said so
ptx-check: env all ## the kernels as nvcc compiles them, on a CPU: PTX translated to C++, against the CPU codecs; needs nvcc, no GPU
	$(PYTHON) -m pytest -q -s tests/cuda/test_ptx.py tests/cuda/test_ptx_instructions.py $(ARGS)
gpu-prebuilt: env-build ## without a GPU: the extension for CPython 3.12 and sm_90, for gpu-check where nothing can be installed; needs nvcc
	$(PYTHON) benchmarks/prebuilt.py
gpu-rehearsal: env ## both calls of gpu-check without a GPU: in small, on the CPU emulation, which it builds; then each part is killed
	PYTHONPATH=tests/cuda $(PYTHON) -c 'import test_emulated; test_emulated.build()'
	rm -rf build/rehearsal build/rehearsal-killed
	for lease in 1 2; do $(PYTHON) benchmarks/gpu_check.py --lease $$lease --rehearse build/emulated --out build/rehearsal && \
	    $(PYTHON) benchmarks/gpu_check.py --lease $$lease --rehearse build/emulated --out build/rehearsal-killed --cut build/rehearsal/lease-$$lease.jsonl || exit 1; done

wheels: env ## a wheel for each Python that is here, in environments beside several versions of torch, where every door is tried (ARGS="--pairs 3.13:2.14.1")
	$(PYTHON) tests/package/wheels.py $(ARGS)
wheel: env-build ## a wheel for this Python, CPU only, in build/wheel; auditwheel tells where it runs (pip install '.[wheel]')
	@rm -rf build/wheel build/wheel-raw
	SIDCOMP_CUDA=0 $(PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w build/wheel-raw .
	@if ! $(PYTHON) -c 'import auditwheel' 2>/dev/null; then mv build/wheel-raw build/wheel; \
	    echo "sidcomp: not audited, for this machine only; to audit it: $(PYTHON) -m pip install '.[wheel]'"; \
	else $(PYTHON) -m auditwheel show build/wheel-raw/*.whl && \
	    PATH="$(dir $(PYTHON)):$$PATH" $(PYTHON) -m auditwheel repair -w build/wheel build/wheel-raw/*.whl; fi
	@ls -l build/wheel

docs: env-docs ## the documentation as a site, in build/site; every link is checked
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build
	@echo "build/site/index.html"

CLANG_FORMAT ?= $(firstword $(wildcard $(dir $(PYTHON))clang-format) clang-format)
FORMATTED     = $(wildcard csrc/*.[ch] csrc/*/*.[ch] cuda/*/*.cu cuda/*/*.h cuda/*/*.cuh python/binding/*.[ch]pp tests/c/*.[ch] tests/fuzz/*.[ch] benchmarks/netlab/*.c)
PYSOURCES     = $(wildcard setup.py python tests examples benchmarks docs/site)
lint: ## clang-format, ruff, mypy, structure, the layers of the package; needs pip install '.[lint]'
	$(CLANG_FORMAT) --dry-run -Werror $(FORMATTED)
	PYTHONPATH=python $(PYTHON) -c 'from importlinter.cli import lint_imports_command as run; run()'
	$(PYTHON) -m ruff check $(PYSOURCES)
	$(PYTHON) -m ruff format --check $(PYSOURCES)
	$(PYTHON) -m mypy
	tests/c/structure.sh
format: ## rewrite the sources in the house style
	$(CLANG_FORMAT) -i $(FORMATTED)
	$(PYTHON) -m ruff format $(PYSOURCES)
	$(PYTHON) -m ruff check --fix $(PYSOURCES)

clean: ## remove what was built; .venv stays
	rm -rf build python/sidcomp/_core*.so python/*.egg-info
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

FORCE:
.PHONY: all ext commands env env-build env-docs venv-make venv-docs venv-refuse train test test-all bench bench-codecs bench-planner bench-plan-real papers figures registers gpu-check gpu-prebuilt gpu-rehearsal ptx-check wheel wheels docs ctest asan tsan asan-python fuzz fuzz-run coverage \
        lint format clean help FORCE
# Else make removes them, as nothing names them. All files would be too many: beside FORCE make takes a secondary one that
# is there for stale.
.SECONDARY: $(FUZZOBJ) $(patsubst %,$O/tests/fuzz/%.c.o,header decode delta exchange fusion state)
-include $(wildcard $(DEPS))
