// What a call works on: addresses that Python gives as integers, and the one argument that holds those of a group.
#ifndef SID_BINDING_BUFFERS_HPP
#define SID_BINDING_BUFFERS_HPP

#include <utility>

#include "common.hpp"

namespace binding {

using Address = uintptr_t;

template <class T = void> T *pointer(Address a) { return reinterpret_cast<T *>(a); }

inline Address address(const void *p) { return reinterpret_cast<Address>(p); }

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

// A group in the host's memory. A pointer may be NULL if no call needs it; a call that needs it raises ArgumentError.
struct Buffers {
    std::shared_ptr<Segments> segments; // Python may drop its own reference
    const sid_segment *segs;
    uint32_t n_seg;
    void *state, *work, *payload; // payload: for an exchange, its wire block

    Buffers(std::shared_ptr<Segments> of, Address state_at, Address work_at, Address payload_at)
        : segments(std::move(of)), segs(segments->parts.data()), n_seg(segments->count()), state(pointer(state_at)),
          work(pointer(work_at)), payload(pointer(payload_at)) {}
};

// The same in a device's memory. It is another type, so that no call takes addresses of the wrong memory.
struct DeviceBuffers {
    const sid_segment *segs; // a copy of Segments.table()
    uint32_t n_seg;
    void *state, *work, *payload;

    DeviceBuffers(Address table, uint32_t n, Address state_at, Address work_at, Address payload_at)
        : segs(pointer<const sid_segment>(table)), n_seg(n), state(pointer(state_at)), work(pointer(work_at)),
          payload(pointer(payload_at)) {}
};

// What a plan's and an exchange's class have of what is kept from step to step; the functions are the core's of the one or of
// the other.
template <class T, class Out, class In, class Change, class Rescale>
void bind_kept(py::class_<T> &c, Out out, In in, Change unsend, Change forget, Rescale rescale) {
    using py::arg;
    c.def(
        "residual_out",
        [out](const T &t, Address state, Address to) {
            const void *const of = t.needed(state);
            need(pointer(to), t.n * t.vectors() * sizeof(float), "out");
            check(without_gil([&] { return out(t.get(), of, pointer<float>(to)); }));
        },
        arg("state"), arg("out"));
    c.def(
        "residual_in",
        [in](const T &t, Address state, Address values) {
            void *const of = t.needed(state);
            need(pointer(values), t.n * t.vectors() * sizeof(float), "values");
            check(without_gil([&] { return in(t.get(), of, pointer<const float>(values)); }));
        },
        arg("state"), arg("values"));
    for (const auto &[name, change] : {std::pair{"unsend", unsend}, std::pair{"forget", forget}})
        c.def(
            name,
            [change = change](const T &t, Address state) {
                void *const of = t.needed(state);
                check(without_gil([&] { return change(t.get(), of); }));
            },
            arg("state"));
    c.def(
        "rescale",
        [rescale](const T &t, Address state, float factor) {
            void *const of = t.needed(state);
            check(without_gil([&] { return rescale(t.get(), of, factor); }));
        },
        arg("state"), arg("factor"));
}

} // namespace binding

#endif
