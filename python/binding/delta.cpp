// Deltas of weights, a block a call. Bodies, work and messages are Python's own buffers; weights are addresses.
#include <algorithm>

#include "buffers.hpp"
#include "sidcomp_delta.h"

namespace binding {

namespace {

// The bytes of a buffer from `offset` on, at least `bytes` of them. It is held while the object lives, which must be longer than
// a call without the GIL.
struct View {
    py::buffer_info info;
    uint8_t *at;
    uint64_t bytes;

    View(const py::buffer &of, uint64_t offset, uint64_t least, bool writable, const char *what)
        : info(of.request(writable)), bytes(static_cast<uint64_t>(info.size * info.itemsize)) {
        if (info.ndim != 1 || (info.size > 1 && info.strides[0] != info.itemsize))
            fail(SID_E_ARG, string(what) + " must be contiguous bytes");
        if (offset > bytes || least > bytes - offset)
            fail(SID_E_SPACE, string(what) + " has " + std::to_string(bytes) + " bytes; " + std::to_string(least) +
                                  " are needed from byte " + std::to_string(offset) + " on");
        at = static_cast<uint8_t *>(info.ptr) + offset;
        bytes -= offset;
    }
};

sid_delta_block block_of(const Segments &s, int kind, uint64_t first, uint64_t n) {
    sid_delta_block b{};
    b.kind = static_cast<sid_delta_kind>(kind);
    b.seg = s.parts.data();
    b.n_seg = s.count();
    b.n = static_cast<uint32_t>(std::min<uint64_t>(n, UINT32_MAX));
    b.first = first;
    return b;
}

py::tuple encode_block(const Segments *old, const Segments &now, int kind, uint64_t first, uint64_t n,
                       const py::buffer &work, const py::buffer &out, uint64_t offset) {
    const sid_delta_block b = block_of(now, kind, first, n);
    if (old && (old->count() != now.count() ||
                !std::equal(old->parts.begin(), old->parts.end(), now.parts.begin(),
                            [](const sid_segment &x, const sid_segment &y) { return x.len == y.len; })))
        fail(SID_E_ARG, "the old segments have other lengths than the new ones");
    const View room(work, 0, old ? sid_delta_work(n) : 0, true, "work");
    const View to(out, offset, sid_delta_bound(b.kind, n), true, "out");
    sid_delta_entry entry{};
    run([&](sid_error *err) {
        return sid_delta_encode(&b, old ? old->parts.data() : nullptr, room.at, to.at, &entry, err);
    });
    return py::make_tuple(entry.checksum, entry.bytes);
}

template <class F>
void decode(F call, const Segments &s, int kind, uint64_t first, uint64_t n, const py::buffer &message, uint64_t offset,
            uint64_t bytes, uint64_t checksum) {
    const sid_delta_block b = block_of(s, kind, first, n);
    if (bytes > UINT64_MAX - SID_DELTA_SLACK) fail(SID_E_SPACE, "a body has fewer than 2^64 bytes");
    const View body(message, offset, bytes ? bytes + SID_DELTA_SLACK : 0, false, "the message");
    const sid_delta_entry entry{checksum, bytes};
    run([&](sid_error *err) { return call(&b, body.at, &entry, err); });
}

// The bytes of the body, or None where it takes the elements.
std::optional<uint64_t> encode_found(int kind, uint64_t n, const py::buffer &changes, uint64_t count,
                                     const py::buffer &runs, const py::buffer &work, const py::buffer &out) {
    const Segments none({}, {});
    const sid_delta_block b = block_of(none, kind, 0, n);
    const uint64_t read = count > sid_delta_room(n) ? 0 : count;
    const View from(changes, 0, read * sizeof(sid_delta_change), false, "changes");
    const View in(runs, 0, sid_delta_runs(b.kind, n) * sizeof(sid_delta_run), false, "runs");
    const View room(work, 0, sid_delta_work(n), true, "work");
    const View to(out, 0, sid_delta_bound(b.kind, n), true, "out");
    sid_delta_entry entry{};
    run([&](sid_error *err) {
        return sid_delta_encode_found(&b, reinterpret_cast<const sid_delta_change *>(from.at), count,
                                      reinterpret_cast<const sid_delta_run *>(in.at), room.at, to.at, &entry, err);
    });
    return entry.bytes == UINT64_MAX ? std::nullopt : std::optional(entry.bytes);
}

// How many there are, or None where the body has the elements.
std::optional<uint32_t> changes_of(int kind, uint64_t n, const py::buffer &message, uint64_t offset, uint64_t bytes,
                                   uint64_t checksum, const py::buffer &out) {
    const Segments none({}, {});
    const View to(out, 0, n * sizeof(sid_delta_change), true, "out");
    uint32_t count = 0;
    const auto call = [&](const sid_delta_block *b, const void *body, const sid_delta_entry *entry, sid_error *err) {
        return sid_delta_changes(b, body, entry, reinterpret_cast<sid_delta_change *>(to.at), &count, err);
    };
    decode(call, none, kind, 0, n, message, offset, bytes, checksum);
    return count > n ? std::nullopt : std::optional(count);
}

void bind_device(py::module_ &m) {
    using py::arg;
    m.attr("delta_elements") = static_cast<int>(SID_DELTA_ELEMENTS);
    m.def("delta_room", sid_delta_room, arg("n"));
    m.def(
        "delta_runs", [](int kind, uint64_t n) { return sid_delta_runs(static_cast<sid_delta_kind>(kind), n); },
        arg("kind"), arg("n"));
    m.def("delta_encode_found", encode_found, arg("kind"), arg("n"), arg("changes"), arg("count"), arg("runs"),
          arg("work"), arg("out"));
    m.def("delta_changes", changes_of, arg("kind"), arg("n"), arg("message"), arg("offset"), arg("bytes"),
          arg("checksum"), arg("out"));
    py::class_<sid_cuda_weights>(m, "DeltaWeights", "Elements of a vector on a device, as blocks.")
        .def(py::init([](int kind, Address table, uint32_t n_segments, uint64_t first, uint64_t n, uint32_t block) {
                 return sid_cuda_weights{static_cast<sid_delta_kind>(kind), n_segments, block,
                                         pointer<const uint64_t>(table),    first,      n};
             }),
             arg("kind"), arg("table"), arg("n_segments"), arg("first"), arg("n"), arg("block"))
        .def(
            "find",
            [](const sid_cuda_weights &w, Address old, uint32_t room, Address found, Address runs, Address changes,
               int device, Address stream) {
                run([&](sid_error *err) {
                    return sid_cuda_delta_find(&w, pointer<const uint64_t>(old), room, pointer<sid_delta_found>(found),
                                               pointer<sid_delta_run>(runs), pointer<sid_delta_change>(changes), device,
                                               pointer(stream), err);
                });
            },
            arg("old"), arg("room"), arg("found"), arg("runs"), arg("changes"), py::kw_only(), arg("device"),
            arg("stream"))
        .def(
            "sum",
            [](const sid_cuda_weights &w, Address changes, Address upto, Address found, int device, Address stream) {
                run([&](sid_error *err) {
                    return sid_cuda_delta_sum(&w, pointer<const sid_delta_change>(changes),
                                              pointer<const uint64_t>(upto), pointer<sid_delta_found>(found), device,
                                              pointer(stream), err);
                });
            },
            arg("changes"), arg("upto"), arg("found"), py::kw_only(), arg("device"), arg("stream"))
        .def(
            "change",
            [](const sid_cuda_weights &w, Address changes, Address upto, int device, Address stream) {
                run([&](sid_error *err) {
                    return sid_cuda_delta_change(&w, pointer<const sid_delta_change>(changes),
                                                 pointer<const uint64_t>(upto), device, pointer(stream), err);
                });
            },
            arg("changes"), arg("upto"), py::kw_only(), arg("device"), arg("stream"));
}

} // namespace

void bind_delta(py::module_ &m) {
    using py::arg;
    m.attr("delta_block") = static_cast<int>(SID_DELTA_BLOCK);
    m.attr("delta_slack") = static_cast<int>(SID_DELTA_SLACK);
    m.attr("delta_floats") = static_cast<int>(SID_DELTA_FLOATS);
    m.def(
        "delta_bound", [](int kind, uint64_t n) { return sid_delta_bound(static_cast<sid_delta_kind>(kind), n); },
        arg("kind"), arg("n"));
    m.def("delta_work", sid_delta_work, arg("n"));
    m.def(
        "delta_bytes", [](int kind, uint64_t n) { return sid_delta_bytes(static_cast<sid_delta_kind>(kind), n); },
        arg("kind"), arg("n"));
    m.def(
        "delta_aligned", [](const py::buffer &data) { return address(View(data, 0, 0, false, "data").at) % 8 == 0; },
        arg("data"));
    m.def("delta_encode", encode_block, arg("old").none(true), arg("new"), arg("kind"), arg("first"), arg("n"),
          arg("work"), arg("out"), arg("offset") = 0);
    const auto of_a_body = [&m](const char *name, auto call) {
        m.def(
            name,
            [call](const Segments &s, int kind, uint64_t first, uint64_t n, const py::buffer &message, uint64_t offset,
                   uint64_t bytes,
                   uint64_t checksum) { decode(call, s, kind, first, n, message, offset, bytes, checksum); },
            arg("segments"), arg("kind"), arg("first"), arg("n"), arg("message"), arg("offset"), arg("bytes"),
            arg("checksum"));
    };
    of_a_body("delta_check", sid_delta_check);
    of_a_body("delta_apply", sid_delta_apply);
    m.def(
        "delta_checksum",
        [](const py::buffer &data, uint64_t offset, uint64_t bytes) {
            const View view(data, offset, bytes, false, "data");
            return without_gil([&] { return sid_delta_checksum(view.at, bytes); });
        },
        arg("data"), arg("offset"), arg("bytes"));
    bind_device(m);
}

} // namespace binding
