/* emulate.h's streams, and what comes before what.
 *
 * Work on a stream waits in a queue, beside a vector clock: how much of every other stream events have told it of, and the
 * host, which knows what it has waited for. Any queue whose first work may begin by its clock is as good as another: chance
 * decides.
 *
 * A shadow says of every byte of memory who wrote it last, and two who have read it since. A thread's accesses between two
 * barriers have one mark. An access that conflicts with an earlier one must come after it: by the clocks of the streams if
 * they are of two launches, else by barriers (order.h). How Lamport's order becomes a check of every access, with the last
 * ones instead of all: Flanagan and Freund, FastTrack, PLDI 2009. */
#include "order.h"

#include <dlfcn.h>
#include <link.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <bitset>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

extern char __start_sid_dims[] __attribute__((visibility("hidden")));
extern char __stop_sid_dims[] __attribute__((visibility("hidden")));

namespace emulate {
namespace {

typedef std::vector<uint32_t> clock_of; /* by the stream's number: so much of its work */

uint32_t part(const clock_of &c, uint32_t i) { return i < c.size() ? c[i] : 0; }
void raise(clock_of &c, uint32_t i, uint32_t to) {
    if (i >= c.size()) c.resize(i + 1);
    if (c[i] < to) c[i] = to;
}
void join(clock_of &c, const clock_of &other) {
    for (uint32_t i = 0; i < other.size(); i++) raise(c, i, other[i]);
}

struct work {
    clock_of after;
    uint32_t number; /* on its stream, from 1 */
    place from;
    std::function<void()> run;
};
struct stream : emulated_stream {
    std::deque<work> queue;
    clock_of knows;
    uint32_t issued = 0, done = 0;
};

std::recursive_mutex one_at_a_time;
std::vector<std::unique_ptr<stream>> streams; /* the first one is the default stream */
clock_of host;
thread_local place next_place;
uint64_t seed, drawn;

stream &stream_of(cudaStream_t s);

/* ---- the shadow ---------------------------------------------------------------------------------------------- */

enum kind {
    READ,
    WRITE,
    ATOMIC
};
enum : uint32_t {
    BY_ATOMIC = 1u << 31,
    GIVEN_BACK = 1u << 30,
    MARK = GIVEN_BACK - 1
};
enum {
    PAGE = 4096,
    CACHED = 4096,
    LOOKS = 256 /* at one place, without anything between them: then others run */
};
struct byte {
    uint32_t written, read[2]; /* marks; 0: nobody */
};
struct launched { /* what runs, or ran */
    place from;
    uint32_t on, number; /* the stream, and its work's number there */
};
struct mark {
    uint32_t launch, thread, block_clock, grid_clock, warp_clock;
};
struct range {
    uintptr_t from = 0, to = 0;
    bool has(uintptr_t at) const { return at - from < to - from; }
};

std::unordered_map<uintptr_t, std::unique_ptr<byte[]>> pages;
struct {
    uintptr_t page;
    byte *bytes;
} cache[CACHED];
std::vector<launched> launches;
std::vector<mark> marks;
uint32_t first_mark = 1; /* those before it come before everything */
uint32_t shared_since = 1;
std::map<uintptr_t, std::bitset<PAGE>> touched; /* bytes of static shared memory, by their page */
clock_of after;                                 /* of what runs */
range statics, dims, arguments;
std::map<uintptr_t, std::pair<uintptr_t, place>> given_back;
uintptr_t looked_at;
uint32_t looks;
bool runs;    /* the last of the launches */
bool watched; /* by the calls below */

/* The variables of the module that this is in: those of a kernel are in shared memory. */
int find_statics(dl_phdr_info *info, size_t, void *) {
    range found, constant;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &p = info->dlpi_phdr[i];
        const range r = {info->dlpi_addr + p.p_vaddr, info->dlpi_addr + p.p_vaddr + p.p_memsz};
        if (p.p_type == PT_LOAD && p.p_flags & PF_W && r.has((uintptr_t)&marks)) found = r;
        if (p.p_type == PT_GNU_RELRO) constant = r;
    }
    if (!found.to) return 0;
    statics = found;
    if (statics.has(constant.from)) statics.from = constant.to; /* which lies at the segment's start */
    return 0;
}

byte *page_of(uintptr_t at) {
    const uintptr_t page = at / PAGE;
    auto &kept = cache[page % CACHED];
    if (kept.page != page || !kept.bytes) {
        std::unique_ptr<byte[]> &bytes = pages[page];
        if (!bytes) bytes.reset(new byte[PAGE]());
        kept = {page, bytes.get()};
    }
    return kept.bytes;
}
byte &byte_at(uintptr_t at) { return page_of(at)[at % PAGE]; }

uint32_t new_mark() {
    if (first_mark + marks.size() >= MARK) stop("more marks than a word has: split the run");
    marks.push_back({(uint32_t)launches.size() - 1, now.thread, now.block_clock, now.grid_clock, now.warp_clock});
    return first_mark + (uint32_t)marks.size() - 1;
}

/* Blocks that meet at no barrier, but by a counter: a thread that has called __threadfence hands on, with its next atomic
 * operation, what its block had done up to its last barrier; one that calls it after an atomic operation at the same place has
 * received that. */
typedef std::map<uint32_t, uint32_t> clocks; /* of blocks: barriers passed */
struct {
    std::set<uint32_t> fenced; /* threads: their next atomic operation hands on */
    uint32_t thread;           /* of the last atomic operation, */
    uintptr_t at;              /* and where it was; 0: there was none */
    std::map<uintptr_t, clocks> handed_on;
    std::map<uint32_t, clocks> received; /* by blocks */
} fences;                                /* of the launch that runs */

void take_in(clocks &to, const clocks &from) {
    for (const auto &c : from) to[c.first] = std::max(to[c.first], c.second);
}
bool has_received(uint32_t block, const mark &m) {
    const auto mine = fences.received.find(block);
    if (mine == fences.received.end()) return false;
    const auto other = mine->second.find(m.thread / now.per_block);
    return other != mine->second.end() && m.block_clock < other->second;
}
void hand_on(uintptr_t at) {
    const uint32_t block = now.thread / now.per_block;
    fences.thread = now.thread;
    fences.at = at;
    if (!fences.fenced.erase(now.thread)) return;
    clocks &c = fences.handed_on[at];
    take_in(c, {{block, now.block_clock}});
    take_in(c, fences.received[block]);
}

/* Whether what has the mark comes before what runs. */
bool before(uint32_t of) {
    if (of < first_mark || of == now.mark) return true;
    const mark &m = marks[of - first_mark];
    if (m.launch + 1 != launches.size()) return part(after, launches[m.launch].on) >= launches[m.launch].number;
    if (m.thread == now.thread) return true;
    if (m.thread / now.per_block != now.thread / now.per_block)
        return m.grid_clock < now.grid_clock || has_received(now.thread / now.per_block, m);
    if (m.block_clock < now.block_clock) return true;
    return m.thread / LANES == now.thread / LANES && m.warp_clock <= now.seen[m.thread % LANES];
}

std::string text_of(const place &p) {
    return std::string("\"") + p.what + "\" at " + p.file + ":" + std::to_string(p.line);
}
/* Where in the source, and whence it is called there, if it is compiled with -g and there is an addr2line. */
std::string line_of(const void *code) {
    Dl_info info;
    if (!code || !dladdr(code, &info) || !info.dli_fname) return "";
    char command[1024], line[512];
    snprintf(command, sizeof command, "addr2line -i -e '%s' %#lx 2>/dev/null", info.dli_fname,
             (unsigned long)((const char *)code - (const char *)info.dli_fbase - 1));
    FILE *f = popen(command, "r");
    std::string out;
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (line[0] != '?') out += std::string(out.empty() ? ", " : " < ") + line;
    }
    if (f) pclose(f);
    return out;
}
std::string stream_name(uint32_t number) {
    return number ? "stream " + std::to_string(number) : std::string("the default stream");
}

void say(const char *text) {
    char thread[128];
    place_of_thread(thread, sizeof thread);
    std::string all = std::string("emulated device: ") + text;
    if (runs) all += " (" + text_of(launches.back().from) + thread + ")";
    next_random(); /* has read the seed */
    all += "; SID_EMULATED_SEED=" + std::to_string(seed) + "\n";
    fputs(all.c_str(), stderr);
    const char *name = getenv("SID_EMULATED_REPORT"); /* a file, where the program's output is lost */
    FILE *f = name ? fopen(name, "a") : nullptr;
    if (!f) return;
    fputs(all.c_str(), f);
    fclose(f);
}

/* stop; with SID_EMULATED_LIST it only says so, and goes on. */
__attribute__((format(printf, 1, 2))) void complain(const char *format, ...) {
    char text[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (!getenv("SID_EMULATED_LIST")) stop("%s", text);
    say(text);
}
/* Whether it has complained of this place in the code before: once is enough. */
bool is_known(const void *code) {
    static std::set<const void *> known;
    return !known.insert(code).second;
}

/* Threads may write the same to one place at once. What a write has done is seen at the access after it. */
struct {
    uintptr_t at;
    uint64_t bytes; /* 0: nothing is in doubt */
    uint32_t other;
    const void *code;
    unsigned char was[16];
} doubted;
void settle_doubt() {
    if (!doubted.bytes) return;
    const uint64_t bytes = doubted.bytes;
    doubted.bytes = 0;
    if (memcmp((const void *)doubted.at, doubted.was, bytes) && !is_known(doubted.code))
        complain(
            "race: a write of %llu bytes of %s memory%s, and no barrier after another value was written by thread %u "
            "of block %u",
            (unsigned long long)bytes, statics.has(doubted.at) ? "shared" : "device", line_of(doubted.code).c_str(),
            doubted.other % now.per_block, doubted.other / now.per_block);
}

void conflict(kind how, uintptr_t at, uint64_t bytes, uint32_t other, bool written, const void *code) {
    static const char *const names[] = {"a read", "a write", "an atomic operation"};
    const bool is_shared = statics.has(at);
    const mark &m = marks[other - first_mark];
    const launched &l = launches[m.launch], &own = launches.back();
    if (m.launch + 1 == launches.size() && how == WRITE && written && bytes <= sizeof doubted.was) {
        doubted.at = at, doubted.bytes = bytes, doubted.other = m.thread;
        doubted.code = code;
        memcpy(doubted.was, (const void *)at, bytes);
        return;
    }
    if (is_known(code)) return;
    const std::string here = line_of(code);
    if (m.launch + 1 == launches.size()) {
        complain("race: %s of %llu bytes of %s memory%s, and no barrier after %s by thread %u of block %u", names[how],
                 (unsigned long long)bytes, is_shared ? "shared" : "device", here.c_str(),
                 written ? "the write" : "the read", m.thread % now.per_block, m.thread / now.per_block);
        return;
    }
    complain("no order: %s of %llu bytes%s on %s by %s, and nothing makes it wait for the %s on %s by %s", names[how],
             (unsigned long long)bytes, here.c_str(), stream_name(own.on).c_str(), text_of(own.from).c_str(),
             written ? "write" : "read", stream_name(l.on).c_str(), text_of(l.from).c_str());
}

[[noreturn]] void use_of_given_back(uintptr_t at, const void *code) {
    const auto next = given_back.upper_bound(at);
    const place &by = std::prev(next)->second.second;
    stop("memory is used%s by %s on %s after it was given back: %s", line_of(code).c_str(),
         text_of(launches.back().from).c_str(), stream_name(launches.back().on).c_str(), text_of(by).c_str());
}

/* Of shared memory: nothing in this block has written to it, which the shadow says, and what it was filled with is still
 * there. For the compiler does not tell of all that is written: not where a function returns a struct to it. What no block
 * before has touched is not filled yet. */
bool unwritten(uintptr_t at, uint64_t bytes) {
    bool none = true;
    for (uint64_t i = 0; i < bytes; i++) {
        if ((byte_at(at + i).written & MARK) >= shared_since) {
            none = false;
            continue;
        }
        const bool filled = is_dynamic((const void *)(at + i)) || touched[(at + i) / PAGE][(at + i) % PAGE];
        if (!filled) touched[(at + i) / PAGE][(at + i) % PAGE] = true;
        none &= filled && *(const unsigned char *)(at + i) == GARBAGE;
    }
    return none;
}

void see(uintptr_t at, uint64_t bytes, kind how, const void *code) {
    if (!now.mark) now.mark = new_mark();
    const bool is_shared = statics.has(at);
    if (is_shared && unwritten(at, bytes) && how != WRITE && !is_known(code))
        complain("a read of %llu bytes of shared memory that nothing has written%s", (unsigned long long)bytes,
                 line_of(code).c_str());
    for (uint64_t i = 0; i < bytes; i++) {
        byte &b = byte_at(at + i);
        if (how == READ ? b.read[0] == now.mark || b.read[1] == now.mark
                        : b.written == now.mark && !b.read[0] && how == WRITE)
            continue;
        if (b.written & GIVEN_BACK) use_of_given_back(at + i, code);
        if (is_shared)
            for (uint32_t *m : {&b.written, b.read, b.read + 1})
                if ((*m & MARK) < shared_since) *m = 0; /* another block's */
        const uint32_t by = b.written & MARK;
        if (by && !(how == ATOMIC && b.written & BY_ATOMIC) && !before(by)) conflict(how, at, bytes, by, true, code);
        if (how == READ) {
            const int slot = !b.read[0] || before(b.read[0])   ? 0
                             : !b.read[1] || before(b.read[1]) ? 1
                                                               : (int)(next_random() & 1);
            b.read[slot] = now.mark;
            continue;
        }
        for (const uint32_t r : b.read)
            if (r && !before(r)) conflict(how, at, bytes, r, false, code);
        b = {now.mark | (how == ATOMIC ? BY_ATOMIC : 0u), {0, 0}};
    }
}

/* An access by a kernel's own code. */
void access(const void *p, uint64_t bytes, kind how, const void *code) {
    const uintptr_t at = (uintptr_t)p;
    if (!inside || on_a_stack(p) || arguments.has(at) || dims.has(at)) return;
    settle_doubt();
    if (at != looked_at || how == WRITE) {
        looked_at = at;
        looks = 0;
    } else if (++looks == LOOKS) {
        looks = 0;
        give_way(true);
    }
    see(at, bytes, how, code);
}

/* ---- queues -------------------------------------------------------------------------------------------------- */

/* Nothing that is still to come could conflict with what is done: so its marks are free again. */
void forget_what_is_settled(const work &next) {
    for (const auto &of : streams) {
        if (part(next.after, of->number) < of->done) return;
        for (const auto &s : streams)
            if (!s->queue.empty() ||
                (s != of && part(s->knows, of->number) < of->done && part(host, of->number) < of->done))
                return;
    }
    first_mark += (uint32_t)marks.size();
    marks.clear();
    launches.clear();
}

void run_first(stream &s) {
    work w = std::move(s.queue.front());
    s.queue.pop_front();
    forget_what_is_settled(w);
    launches.push_back({w.from, s.number, w.number});
    fences = {};
    after = w.after;
    now = {0, 1, 0, 0, 0, nullptr, 0};
    looked_at = 0;
    runs = true;
    w.run();
    settle_doubt();
    runs = false;
    s.done = w.number;
}

/* Draws what is done next, until the stream has done `number` of its own. In half of the time, for 32 calls on average, other
 * streams are left behind as long as the stream need not wait for them: they would otherwise be done by chance before many
 * a program that does not wait has come to look. */
void run_until(stream &s, uint32_t number) {
    static bool lazy = false;
    if (s.done < number && next_random() % 32 == 0) lazy = !lazy;
    while (s.done < number) {
        std::vector<stream *> can;
        for (const auto &one : streams) {
            if (one->queue.empty()) continue;
            const clock_of &c = one->queue.front().after;
            bool may = true;
            for (uint32_t i = 0; i < c.size(); i++) may &= streams[i]->done >= c[i];
            if (may) can.push_back(one.get());
        }
        if (can.empty()) stop("streams wait for one another");
        const bool own = lazy && std::find(can.begin(), can.end(), &s) != can.end();
        run_first(own ? s : *can[next_random() % can.size()]);
    }
}

void add(stream &s, const place &from, std::function<void()> run) {
    join(s.knows, host);
    work w = {s.knows, ++s.issued, from, std::move(run)};
    raise(s.knows, s.number, s.issued);
    s.queue.push_back(std::move(w));
    if (!s.number) run_until(s, s.issued);
}

stream &new_stream() {
    std::unique_ptr<stream> s(new stream);
    s->drain = [](emulated_stream *of) {
        const std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
        run_until(stream_of(of), stream_of(of).issued);
    };
    s->touch = [](emulated_stream *of, const void *at, uint64_t bytes, int writes, const char *who) {
        emulated_touch(of, at, bytes, writes, who);
    };
    s->number = (uint32_t)streams.size();
    s->knows = host;
    streams.push_back(std::move(s));
    return *streams.back();
}

stream &stream_of(cudaStream_t s) {
    if (streams.empty()) {
        new_stream();
        dl_iterate_phdr(find_statics, nullptr);
        dims = {(uintptr_t)__start_sid_dims, (uintptr_t)__stop_sid_dims};
    }
    return s ? *static_cast<stream *>(s) : *streams[0];
}

void wait(stream &s) {
    run_until(s, s.issued);
    join(host, s.knows);
}

} // namespace

place::place(const char *w, const char *f, int l) : what(w), file(f), line(l) { next_place = *this; }

void stop(const char *format, ...) {
    char text[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    say(text);
    abort();
}

uint64_t next_random() {
    if (!drawn) {
        const char *given = getenv("SID_EMULATED_SEED");
        seed = given ? strtoull(given, nullptr, 10) : 1;
        drawn = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
        for (int i = 0; i < 8; i++) next_random();
    }
    drawn ^= drawn << 13;
    drawn ^= drawn >> 7;
    return drawn ^= drawn << 17;
}

void new_shared_memory() {
    settle_doubt();
    shared_since = first_mark + (uint32_t)marks.size();
    for (const auto &page : touched)
        for (uintptr_t i = 0; i < PAGE; i++)
            if (page.second[i]) *(unsigned char *)(page.first * PAGE + i) = GARBAGE;
}

void atomic(const void *at, uint64_t bytes) {
    access(at, bytes, ATOMIC, __builtin_return_address(0));
    hand_on((uintptr_t)at);
}
void fence() {
    fences.fenced.insert(now.thread);
    if (fences.at && fences.thread == now.thread)
        take_in(fences.received[now.thread / now.per_block], fences.handed_on[fences.at]);
}

uint64_t launched_so_far, until_failure; /* launches; 0: none fails */

cudaError_t launch(const cudaLaunchConfig_t &c, kernel_call *call) {
    const std::lock_guard<std::recursive_mutex> lock(one_at_a_time);
    std::shared_ptr<kernel_call> kept(call);
    const place from = next_place;
    next_place = {};
    if (until_failure && !--until_failure) return cudaErrorInvalidValue;
    launched_so_far++;
    check_shape(c, from);
    std::vector<cudaLaunchAttribute> attributes(c.attrs, c.attrs + c.numAttrs);
    add(stream_of(c.stream), from, [given = c, kept, attributes]() mutable {
        given.attrs = attributes.data();
        arguments = {(uintptr_t)kept.get(), (uintptr_t)kept.get() + kept->bytes};
        run_kernel(given, *kept);
        arguments = {};
    });
    return cudaSuccess;
}

} // namespace emulate

using namespace emulate;

struct emulated_event {
    clock_of at;
    uint32_t on = 0;
};

#define LOCKED const std::lock_guard<std::recursive_mutex> lock(one_at_a_time)

cudaError_t cudaStreamCreate(cudaStream_t *s) {
    LOCKED;
    stream_of(nullptr);
    *s = &new_stream();
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    LOCKED;
    wait(stream_of(s));
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    LOCKED;
    stream_of(nullptr);
    for (const auto &s : streams) wait(*s);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = new emulated_event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
    LOCKED;
    event->at = stream_of(s).knows;
    join(event->at, host);
    event->on = stream_of(s).number;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned) {
    LOCKED;
    join(stream_of(s).knows, event->at);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    LOCKED;
    if (!streams.empty()) run_until(*streams[event->on], part(event->at, event->on));
    join(host, event->at);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **at, size_t bytes, cudaStream_t s, const char *, int) {
    LOCKED;
    stream_of(s);
    *at = aligned_alloc(256, (bytes + 511) / 256 * 256);
    memset(*at, GARBAGE, bytes);
    emulated_fresh(*at, bytes);
    return *at ? cudaSuccess : cudaErrorInvalidValue;
}
/* The memory stays, so that whoever uses it is found. */
cudaError_t cudaFreeAsync(void *at, cudaStream_t s, const char *file, int line) {
    LOCKED;
    const place by("cudaFreeAsync", file, line);
    const size_t bytes = malloc_usable_size(at);
    add(stream_of(s), by, [at, bytes, by] {
        see((uintptr_t)at, bytes, WRITE, nullptr);
        for (uint64_t i = 0; i < bytes; i++) byte_at((uintptr_t)at + i).written |= GIVEN_BACK;
        given_back[(uintptr_t)at] = {(uintptr_t)at + bytes, by};
        memset(at, GARBAGE, bytes);
    });
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t s, const char *file,
                            int line) {
    LOCKED;
    add(stream_of(s), place("cudaMemcpyAsync", file, line), [=] {
        see((uintptr_t)from, bytes, READ, nullptr);
        see((uintptr_t)to, bytes, WRITE, nullptr);
        memmove(to, from, bytes);
    });
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t s, const char *file, int line) {
    LOCKED;
    add(stream_of(s), place("cudaMemsetAsync", file, line), [=] {
        see((uintptr_t)at, bytes, WRITE, nullptr);
        memset(at, value, bytes);
    });
    return cudaSuccess;
}

static place named(const char *who) {
    static std::set<std::string> names; /* the caller's text may go */
    return place(names.insert(who).first->c_str(), "the host's program", 0);
}
void emulated_touch(cudaStream_t s, const void *at, uint64_t bytes, int writes, const char *who) {
    LOCKED;
    stream &on = stream_of(s);
    const kind how = writes ? WRITE : READ;
    add(on, named(who), [=] { see((uintptr_t)at, bytes, how, nullptr); });
    run_until(on, on.issued);
}
void emulated_give_back(cudaStream_t s, const void *at, uint64_t bytes, const char *who) {
    emulated_touch(s, at, bytes, 1, who);
    emulated_fresh(at, bytes);
}
void emulated_fresh(const void *p, uint64_t bytes) {
    LOCKED;
    for (uintptr_t at = (uintptr_t)p, end = at + bytes; at < end;) {
        const uintptr_t stop_at = std::min(end, (at / PAGE + 1) * PAGE);
        const auto found = pages.find(at / PAGE);
        if (found != pages.end()) memset(&found->second[at % PAGE], 0, (stop_at - at) * sizeof(byte));
        at = stop_at;
    }
}

/* ---- what the compiler calls ----------------------------------------------------------------------------------- */

#define HERE __builtin_return_address(0)
#define SIZED(n)                                                                                                       \
    void __tsan_read##n(void *p) { access(p, n, READ, HERE); }                                                         \
    void __tsan_write##n(void *p) { access(p, n, WRITE, HERE); }                                                       \
    void __tsan_unaligned_read##n(void *p) { access(p, n, READ, HERE); }                                               \
    void __tsan_unaligned_write##n(void *p) { access(p, n, WRITE, HERE); }                                             \
    void __tsan_volatile_read##n(void *p) { access(p, n, READ, HERE); }                                                \
    void __tsan_volatile_write##n(void *p) { access(p, n, WRITE, HERE); }                                              \
    void __tsan_read_write##n(void *p) {                                                                               \
        access(p, n, READ, HERE);                                                                                      \
        access(p, n, WRITE, HERE);                                                                                     \
    }
extern "C" {
SIZED(1)
SIZED(2)
SIZED(4)
SIZED(8)
SIZED(16)
void __tsan_init() { watched = true; } /* before main, if anything is compiled so */
int emulated_watched() { return watched; }
uint64_t emulated_launches() { return emulate::launched_so_far; }
void emulated_fail_launch(int next) { emulate::until_failure = (uint64_t)next; } /* 1: the next one cannot be made */
uint64_t emulated_grid_barriers() { return emulate::grid_barriers_so_far(); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_read_range(void *p, size_t n) { access(p, n, READ, HERE); }
void __tsan_write_range(void *p, size_t n) { access(p, n, WRITE, HERE); }
/* Whether a static of the host is initialised. */
char __tsan_atomic8_load(const volatile char *at, int) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void *__tsan_memcpy(void *to, const void *from, size_t n) {
    access(from, n, READ, HERE);
    access(to, n, WRITE, HERE);
    return memcpy(to, from, n);
}
void *__tsan_memmove(void *to, const void *from, size_t n) {
    access(from, n, READ, HERE);
    access(to, n, WRITE, HERE);
    return memmove(to, from, n);
}
void *__tsan_memset(void *p, int value, size_t n) {
    access(p, n, WRITE, HERE);
    return memset(p, value, n);
}
}
