/* For bench_instructions.py: a plugin for QEMU's user emulation, which counts how often each instruction of the marked call is
 * executed. Arguments: begin, end (the addresses of the driver's two marks), start (of the program), size (of its text) and
 * out (a file), as in `qemu-aarch64 -plugin plugin.so,begin=0x...,...`.
 *
 * The interface is that of QEMU 7.2's documentation (version 1 of the plugin API). What is called of it is declared here, so that no
 * header of QEMU is needed. */
#define _POSIX_C_SOURCE 200809L
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

struct tb;
struct insn;
struct info;
typedef uint64_t plugin_id;
EXPORT int qemu_plugin_install(plugin_id id, const struct info *info, int argc, char **argv);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*call)(plugin_id, struct tb *));
size_t qemu_plugin_tb_n_insns(const struct tb *tb);
struct insn *qemu_plugin_tb_get_insn(const struct tb *tb, size_t i);
uint64_t qemu_plugin_insn_vaddr(const struct insn *insn);
enum op {
    ADD = 0
};
enum registers {
    NONE = 0
};
void qemu_plugin_register_vcpu_insn_exec_inline(struct insn *insn, enum op op, void *p, uint64_t by);
void qemu_plugin_register_vcpu_insn_exec_cb(struct insn *insn, void (*call)(unsigned, void *), enum registers which,
                                            void *data);

EXPORT extern const int qemu_plugin_version;
const int qemu_plugin_version = 1;

static uint64_t *counts, begin, end, start, size;
static const char *out;

static void at_begin(unsigned cpu, void *data) {
    (void)cpu, (void)data;
    memset(counts, 0, size * sizeof *counts);
}

static void at_end(unsigned cpu, void *data) {
    (void)cpu, (void)data;
    FILE *f = fopen(out, "w");
    if (!f) return;
    for (uint64_t i = 0; i < size; i++)
        if (counts[i]) fprintf(f, "%lx %lu\n", (unsigned long)i, (unsigned long)counts[i]);
    fclose(f);
}

static void translated(plugin_id id, struct tb *tb) {
    (void)id;
    const size_t n = qemu_plugin_tb_n_insns(tb);
    for (size_t i = 0; i < n; i++) {
        struct insn *insn = qemu_plugin_tb_get_insn(tb, i);
        const uint64_t at = qemu_plugin_insn_vaddr(insn);
        if (at - start < size) qemu_plugin_register_vcpu_insn_exec_inline(insn, ADD, counts + (at - start), 1);
        if (at == begin) qemu_plugin_register_vcpu_insn_exec_cb(insn, at_begin, NONE, NULL);
        if (at == end) qemu_plugin_register_vcpu_insn_exec_cb(insn, at_end, NONE, NULL);
    }
}

int qemu_plugin_install(plugin_id id, const struct info *info, int argc, char **argv) {
    (void)info;
    for (int i = 0; i < argc; i++) {
        char *is = strchr(argv[i], '=');
        if (!is) return 1;
        const uint64_t value = strtoull(is + 1, NULL, 0);
        const size_t name = (size_t)(is - argv[i]);
        if (!strncmp(argv[i], "begin", name))
            begin = value;
        else if (!strncmp(argv[i], "end", name))
            end = value;
        else if (!strncmp(argv[i], "start", name))
            start = value;
        else if (!strncmp(argv[i], "size", name))
            size = value;
        else if (!strncmp(argv[i], "out", name))
            out = strdup(is + 1);
        else
            return 1;
    }
    counts = calloc(size, sizeof *counts);
    if (!counts || !begin || !end || !out) return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
