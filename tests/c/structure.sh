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
only csrc/bits.h csrc/rng.h csrc/special.h csrc/sums.h -- wire.h
only csrc/plan.h -- sidcomp.h wire.h
only csrc/isa/simd.h -- '\.\./(bits|rng|sidcomp|sums).h'
only csrc/isa/simd.c -- '\.\./special.h' simd.h '[a-z]+\.inc\.h'
only csrc/isa/*.inc.h --
only csrc/codec.h -- '(bits|isa/simd|plan|rng|sums).h'
only csrc/codec/*.[ch] -- '\.\./(codec|special).h' '[a-z]+\.h'
only csrc/memory/*.c -- '\.\./codec.h'
only csrc/checksum.h csrc/core.h csrc/sound.h -- codec.h
only csrc/*.c -- '(checksum|core|sound).h' codecs.def memories.def
only csrc/fusion.h --
only csrc/fusion/*.h -- '\.\./fusion.h'
only csrc/fusion/*.c -- planner.h
only csrc/exchange/*.h -- '\.\./core.h'
only csrc/exchange/*.c -- exchange.h '\.\./checksum.h' '\.\./exchanges.def'
none 'internal.h is for cuda/ and the tests' grep -rn '"\(\.\./\)*internal\.h"' csrc
only python/bindings.cpp -- fusion.h sidcomp.h
none 'torch belongs to Python' grep -rnE '#include *[<"](torch|ATen|c10)' csrc cuda python --include=*.[ch]* --include=*.cu
none 'the core allocates, prints, exits or reads the environment' \
    grep -nE '\b(malloc|calloc|realloc|free|printf|fprintf|puts|exit|abort|getenv|fopen|time|clock)\(' -r csrc
none 'the core has a global that changes' \
    grep -rnE '^(static )?(_Atomic |volatile )?(unsigned |u?int[0-9]*_t |int |float |double |char |size_t |void \*)[a-z_ ]*(=|;|\[)' csrc --include=*.c
none 'a device call waits for the host' \
    grep -rnE 'cuda(DeviceSynchronize|StreamSynchronize|EventSynchronize|Malloc|Free|Memcpy)\(' cuda --include=*.cu --include=*.cuh

none 'a kernel does not begin with sid_follow()' \
    bash -c 'grep -Pzo "__global__[^{;]*\{(?!\s*sid_follow\(\);)[^\n]*" "$@" | tr "\0" "\n"' _ cuda/*.cu cuda/*.cuh

none "writes among a codec's or memory's parameters" \
    grep -rnE '(codec|memory)_param\[[^]]*\] *[-+*/|&^]?=[^=]|(^|[^t] )double \*[a-z_]+ = [a-z>.-]*(codec|memory)_param' csrc cuda --exclude=plan.c
none 'a table of parameters whose length nobody asserts: SID_PARAMETERS does' \
    grep -rnE '\.n_params *=' csrc cuda --include=*.c --include=*.cu --include=*.cuh

# a codec's own name, not those of its parameters, which their kind follows
names=$(cat csrc/codec/*.c | grep -Pzo '\.name = "[^"]+",\s*+(?!\.kind)' | tr '\0' '\n' | cut -sd'"' -f2 | grep -vx none | paste -sd'|')
[ -n "$names" ] || { echo "no codec names found in csrc/codec"; bad=1; }
none 'knows a codec by name' bash -c \
    'grep -nE "\"($1)\"" csrc/*.[ch] csrc/memory/* csrc/isa/* cuda/* python/bindings.cpp |
     grep -vE "^csrc/memory/[^:]*:[0-9]+: *((\.info = )?\{\.name =|static const char \*const [a-z]+\[\] = )" |
     grep -vE "^python/bindings.cpp:[0-9]+:constexpr Name bodies\[\] = "' _ "$names" # a memory, a choice of one, or a body's dtype may bear a codec's name
none 'switches on a codec by name' bash -c \
    'grep -nE "(==|!=|\bin\b|case) *[[(]*[\"'"'"']($1)[\"'"'"']" python/sidcomp/*.py' _ "$names"
none 'switches on a codec by id' grep -rnE 'wire_id *(==|!=)|switch *\(.*(codec|wire_id)' csrc cuda python/sidcomp --include=*.c --include=*.h --include=*.cu* --include=*.py

[ $bad = 0 ] && echo "structure: as it should be"
exit $bad
