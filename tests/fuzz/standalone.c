/* Without libFuzzer: runs the files it is given (to look at a finding), or -runs=N inputs made of random bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../c/test.h"
#include "fuzz.h"

static int run_file(const char *path) {
    static uint8_t data[1 << 16];
    FILE *f = fopen(path, "rb");
    if (!f) return 0;
    const size_t size = fread(data, 1, sizeof data, f);
    const int read = !ferror(f);
    fclose(f);
    if (!read) return 0; /* a directory */
    uint8_t *exact = malloc(size + 1);
    memcpy(exact, data, size);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    return 1;
}

int main(int argc, char **argv) {
    unsigned long runs = 0, files = 0;
    for (int i = 1; i < argc; i++)
        if (!strncmp(argv[i], "-runs=", 6))
            runs = strtoul(argv[i] + 6, NULL, 10);
        else if (argv[i][0] != '-')
            files += (unsigned long)run_file(argv[i]);
    rng r = {1};
    for (unsigned long k = 0; k < runs; k++) {
        uint8_t data[512];
        const size_t size = 6 + rng_below(&r, rng_below(&r, 8) ? 60 : sizeof data - 6);
        for (size_t i = 0; i < size; i++) data[i] = (uint8_t)rng_next(&r);
        uint8_t *exact = malloc(size);
        memcpy(exact, data, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%lu inputs, %lu files: no finding\n", runs, files);
    return 0;
}
