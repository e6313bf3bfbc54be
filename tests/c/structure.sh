#!/bin/bash
# What the compiler does not check: dependencies point one way, the core keeps to itself, and nothing but a codec's own
# file (and codecs.def) knows a codec by name. Prints each line at fault.
set -euo pipefail
cd "$(dirname "$0")/../.."
bad=0

none() { # TEXT, then a grep whose output must be empty
    local text=$1 found
    shift
    found=$("$@" || true)
    [ -z "$found" ] && return
    printf '%s:\n%s\n' "$text" "$found" | sed '2,$s/^/    /'
    bad=1
}
only() { # FILES..., --, the headers of the project that they may include
    local files=() allowed
    while [ "$1" != -- ]; do files+=("$1"); shift; done
    shift
    allowed=$(IFS='|'; echo "$*")
    none "may only include ${*:-nothing of the project}" \
        bash -c 'grep -nE "^#include \"" "${@:2}" /dev/null | grep -vE "\"($1)\""' _ "${allowed:-/}" "${files[@]}"
}

only csrc/wire.h csrc/sidcomp.h --
only csrc/sidcomp_cuda.h csrc/sidcomp_delta.h -- sidcomp.h
only csrc/sidcomp_nccl.h -- sidcomp_cuda.h
only csrc/bits.h csrc/rans.h csrc/rng.h csrc/special.h csrc/sums.h -- wire.h
only csrc/core/plan.h -- '\.\./(sidcomp|wire).h'
only csrc/isa/simd.h -- '\.\./(bits|rans|rng|sidcomp|sums).h'
only csrc/isa/simd.c -- '\.\./special.h' simd.h '[a-z]+\.inc\.h'
only csrc/isa/*.inc.h --
only csrc/codec.h -- '(bits|core/plan|isa/simd|rans|rng|sums).h'
only csrc/codec/*.[ch] -- '\.\./(codec|core/sound|special).h' '[a-z_]+\.h'
only csrc/memory/*.c -- '\.\./codec.h'
only csrc/core/{checksum,core,sound,vectors}.h -- '\.\./codec.h'
only csrc/core/registry.c -- core.h '\.\./exchange/exchange.h' '\.\./(codecs|exchanges|memories).def'
only $(ls csrc/core/*.c | grep -v registry.c) -- '(checksum|core|sound|vectors).h' '\.\./sidcomp_cuda.h'
only csrc/delta/*.h -- '\.\./(core/core|sidcomp_delta|wire).h' elements.h
only csrc/delta/*.c -- delta.h
only csrc/fusion.h --
only csrc/fusion/*.h -- '\.\./fusion.h'
only csrc/fusion/*.c -- planner.h
only csrc/exchange/*.h -- '\.\./(core/core.h|exchanges.def)'
only csrc/exchange/*.c -- exchange.h '\.\./(core/checksum|core/vectors|sidcomp_cuda|sidcomp_nccl).h'
none 'internal.h is for cuda/ and the tests' grep -rn '"\(\.\./\)*internal\.h"' csrc
only python/binding/module.cpp -- '[a-z]+\.cpp'
only $(ls python/binding/*.[ch]pp | grep -v module.cpp) -- fusion.h 'sidcomp(_cuda|_delta|_nccl)?.h' '[a-z]+\.hpp'

only cuda/core/map.h -- internal.h
only cuda/core/*.cu* -- '(call|codec|device|header|memories|pass)\.cuh' '(map|emulate)\.h' '(codecs|memories)\.def'
only cuda/codec/*.cu* -- '\.\./core/codec\.cuh' '[a-z_]+\.cuh' 'codec/[a-z_]+\.h'
only cuda/delta/*.cu* -- '\.\./core/device\.cuh' 'delta/elements\.h'
only cuda/exchange/*.cu* -- '\.\./core/codec\.cuh' exchange.cuh exchange/exchange.h exchanges.def

circles() { # TEXT, then pairs of files on stdin, of which the first stands on the second
    local found
    found=$(tsort 2>&1 >/dev/null || true)
    [ -z "$found" ] && return
    printf '%s:\n%s\n' "$1" "$found" | sed '2,$s/^tsort: //; 2,$s/^/    /'
    bad=1
}
sources=$(find csrc -name '*.[ch]' | sort)
circles 'headers include one another in a circle' < <(
    grep -nE '^#include "' $sources | sed -E 's/^([^:]*):[0-9]+:#include "([^"]*)".*/\1 \2/' | while read -r from to; do
        echo "$from $(realpath -m --relative-to=. "$(dirname "$from")/$to")"
    done)
# A function that is defined at the start of a line of one file, and its name in another; comments left out. Tables of
# codecs, memories and exchanges are data, and no calls.
circles 'files call one another in a circle' < <(
    awk '
    FNR == 1 { file[++files] = FILENAME }
    {
        line = $0 # without comments
        while ((inside && (i = index(line, "*/"))) || (!inside && (i = index(line, "/*")))) {
            kept = kept (inside ? "" : substr(line, 1, i - 1))
            line = substr(line, i + 2)
            inside = !inside
        }
        kept = kept (inside ? "" : line)
        if (kept ~ /^[a-z][a-z0-9_ *]*[ *][a-z0-9_]+\(/ && kept !~ /^(static|typedef|extern) / && kept !~ /;$/) {
            name = substr(kept, 1, index(kept, "(") - 1)
            sub(/.*[ *]/, "", name)
            home[name] = FILENAME
        }
        gsub(/[^A-Za-z0-9_]+/, " ", kept)
        text[files] = text[files] " " kept
        kept = ""
    }
    END {
        for (f = 1; f <= files; f++) {
            n = split(text[f], word, " ")
            for (i = 1; i <= n; i++)
                if (word[i] in home && home[word[i]] != file[f] && !((f, home[word[i]]) in told)) {
                    told[f, home[word[i]]] = 1
                    print file[f], home[word[i]]
                }
        }
    }' $(find csrc -name '*.c' ! -path 'csrc/isa/*' | sort))
none 'torch belongs to Python' grep -rnE '#include *[<"](torch|ATen|c10)' csrc cuda python --include=*.[ch]* --include=*.cu
none 'the core allocates, prints, exits or reads the environment' \
    grep -nE '\b(malloc|calloc|realloc|free|printf|fprintf|puts|exit|abort|getenv|fopen|time|clock)\(' -r csrc
none 'the core has a global that changes' \
    grep -rnE '^(static )?(_Atomic |volatile )?(unsigned |u?int[0-9]*_t |int |float |double |char |size_t |void \*)[a-z_ ]*(=|;|\[)' csrc --include=*.c
none 'asks the processor in a step: an exchange has x->simd, a plan p->simd' \
    bash -c 'grep -nE "sid_simd_for\(" csrc/codec/* csrc/memory/* csrc/exchange/* csrc/core/{encode,decode,vectors}.c |
             grep -v "^csrc/exchange/make.c:[0-9]*: *x->simd = "'
# nvcc compiles them by the host's compiler, which has its own opinion of {0}
none 'a header of csrc/ that cuda/ includes is no C++' bash -c '
    grep -hoE "^#include \"[a-z_/]+\.h\"" "$@" | sort -u |
        while IFS=\" read -r start name; do for path in csrc/$name $(echo csrc/*/$name); do [ -e $path ] && echo "#include \"$path\""; done; done |
        ${CXX:-c++} -std=c++17 -I. -Icsrc -fsyntax-only -Wall -Wextra -Werror -x c++ - 2>&1' _ cuda/*/*.cu*
none 'a device call waits for the host' \
    grep -rnE 'cuda(DeviceSynchronize|StreamSynchronize|EventSynchronize|Malloc|Free|Memcpy)\(' cuda --include=*.cu --include=*.cuh

none 'a kernel does not begin with sid_follow()' \
    bash -c 'grep -Pzo "__global__[^{;]*\{(?!\s*sid_follow\(\);)[^\n]*" "$@" | tr "\0" "\n"' _ cuda/*/*.cu cuda/*/*.cuh

none "writes among a codec's or memory's parameters" \
    grep -rnE '(codec|memory)_param\[[^]]*\] *[-+*/|&^]?=[^=]|(^|[^t] )double \*[a-z_]+ = [a-z>.-]*(codec|memory)_param' csrc cuda --exclude=plan.c
none 'a table of parameters whose length nobody asserts: SID_PARAMETERS does' \
    grep -rnE '\.n_params *=' csrc cuda --include=*.c --include=*.cu --include=*.cuh

# a codec's own name, not those of its parameters, which their kind follows
names=$(cat csrc/codec/*.c | grep -Pzo '\.name = "[^"]+",\s*+(?!\.kind)' | tr '\0' '\n' | cut -sd'"' -f2 | grep -vx none | paste -sd'|')
[ -n "$names" ] || { echo "no codec names found in csrc/codec"; bad=1; }
none 'knows a codec by name' bash -c \
    'grep -nE "\"($1)\"" csrc/*.h csrc/core/* csrc/memory/* csrc/isa/* cuda/*/* python/binding/* |
     grep -vE "^csrc/memory/[^:]*:[0-9]+: *((\.info = )?\{\.name =|static const char \*const [a-z]+\[\] = )" |
     grep -vE "^python/binding/registry.cpp:[0-9]+:(constexpr Name bodies\[\] = | +\{\"[a-z]+\", SID_)" |
     grep -vE "^python/binding/plan.cpp:[0-9]+: +\.def_property_readonly"' _ "$names" # a memory, a choice of one, a body's dtype or a trait may bear a codec's name
none 'switches on a codec by name' bash -c \
    'grep -nE "(==|!=|\bin\b|case) *[[(]*[\"'"'"']($1)[\"'"'"']" python/sidcomp/*.py' _ "$names"
none 'switches on a codec by id' grep -rnE 'wire_id *(==|!=)|switch *\(.*(codec|wire_id)' csrc cuda python/sidcomp --include=*.c --include=*.h --include=*.cu* --include=*.py

[ $bad = 0 ] && echo "structure: as it should be"
exit $bad
