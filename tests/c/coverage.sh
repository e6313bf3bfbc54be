#!/bin/sh
# coverage.sh FOLDER: what gcov says of the objects there, by file of csrc/: lines, and branches taken at least once.
# csrc/isa/simd.c, with its fragments, is compiled once per instruction set and counted once per set.
set -eu
find "$1" -name '*.gcda' | grep -v /tests/ | while read -r data; do
    gcov -b -n -o "$data" "$data" 2>/dev/null
done | awk '
    /^File / { file = $2; gsub("\047", "", file); seen = file ~ /^csrc\// }
    !seen { next }
    { split($0, part, "[:% ]+") }
    /^Lines executed/ { lines[file] += part[5]; run[file] += part[5] * part[3] / 100 }
    /^Taken at least once/ { branches[file] += part[7]; taken[file] += part[7] * part[5] / 100 }
    function percent(part, all) { return all ? 100 * part / all : 100 }
    function row(name, l, r, b, t) {
        return sprintf("%-28s %6.1f %% of %5d lines   %6.1f %% of %5d branches", name, percent(r, l), l, percent(t, b), b)
    }
    END {
        for (f in lines) {
            print row(f, lines[f], run[f], branches[f], taken[f]) | "sort"
            L += lines[f]; R += run[f]; B += branches[f]; T += taken[f]
        }
        close("sort")
        print row("csrc", L, R, B, T)
    }'
