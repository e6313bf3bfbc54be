// What a call works on: addresses that Python gives as integers, and the one argument that they become here.
#ifndef SID_BINDING_BUFFERS_HPP
#define SID_BINDING_BUFFERS_HPP

#include "common.hpp"

namespace binding {

using Address = uintptr_t;

template <class T = void> T *pointer(Address a) { return reinterpret_cast<T *>(a); }

// Raises ArgumentError where nothing is given but `bytes` are needed.
inline void need(const void *p, uint64_t bytes, const char *what) {
    if (!p && bytes) fail(SID_E_ARG, string(what) + " is NULL, but " + std::to_string(bytes) + " bytes are needed");
}

struct Segments {
    std::vector<sid_segment> parts;
    uint64_t n = 0; // elements in all

    Segments(const std::vector<Address> &pointers, const std::vector<uint64_t> &lengths);
    uint32_t count() const { return static_cast<uint32_t>(parts.size()); }
};

// A group's places in memory, all in the host's or all in the device's.
struct Buffers {
    const sid_segment *segs;
    uint32_t n_seg;
    void *state, *work, *payload; // payload: of an exchange of messages its wire block

    Buffers(const Segments &on_host, Address state_at, Address work_at, Address payload_at)
        : Buffers(on_host.parts.data(), on_host.count(), state_at, work_at, payload_at) {}
    // table: a copy of Segments.table() on the device
    Buffers(Address table, uint32_t n, Address state_at, Address work_at, Address payload_at)
        : Buffers(pointer<const sid_segment>(table), n, state_at, work_at, payload_at) {}

  private:
    Buffers(const sid_segment *of, uint32_t n, Address state_at, Address work_at, Address payload_at)
        : segs(of), n_seg(n), state(pointer(state_at)), work(pointer(work_at)), payload(pointer(payload_at)) {}
};

// Where a device's call is enqueued.
struct Stream {
    int device; // may have SID_CUDA_EARLY in it
    Address handle;
    void *get() const { return pointer(handle); }
};

} // namespace binding

#endif
