// Segments, what is computed over them alone, and the layouts in memory that Python must know.
#include "buffers.hpp"

#include <cstring>

#include "registry.hpp"

namespace binding {

namespace {

// A state is a header, the memory's vectors, and what the codec keeps. A lossless plan keeps no vectors.
uint64_t state_header_bytes() {
    const sid_info *codec = nullptr;
    for (uint32_t i = 0; (codec = sid_codec_at(i)) && !(codec->traits & SID_LOSSLESS);) i++;
    if (!codec) fail(SID_E_UNSUPPORTED, "there is no lossless codec");
    sid_config config{};
    config.codec = codec->name;
    config.memory = sid_memory_at(0)->name;
    sid_error err{};
    size_t bytes = 0;
    check(sid_plan_make(&config, nullptr, &bytes, &err), err);
    const Block block = make_block(bytes);
    check(sid_plan_make(&config, block.get(), &bytes, &err), err);
    const auto *plan = static_cast<const sid_plan *>(block.get());
    return sid_plan_sizes(plan).state - sid_plan_extra(plan);
}

py::tuple state_lasting() {
    py::list parts;
    for (uint32_t i = 0;; i++) {
        const sid_byte_range part = sid_state_lasting(i);
        if (part.first == part.end) return py::tuple(parts);
        parts.append(py::make_tuple(part.first, part.end));
    }
}

sid_stats read_stats(const py::bytes &data) {
    const string bytes = data;
    sid_stats stats;
    if (bytes.size() != sizeof stats)
        fail(SID_E_ARG, "Stats have " + std::to_string(sizeof stats) + " bytes, not " + std::to_string(bytes.size()));
    std::memcpy(&stats, bytes.data(), sizeof stats);
    return stats;
}

} // namespace

Segments::Segments(const std::vector<Address> &pointers, const std::vector<uint64_t> &lengths) {
    if (pointers.size() != lengths.size())
        fail(SID_E_ARG, "there are " + std::to_string(pointers.size()) + " pointers, but " +
                            std::to_string(lengths.size()) + " lengths: give one of each per segment");
    if (pointers.size() > UINT32_MAX) fail(SID_E_ARG, "there are more than 2^32 - 1 segments");
    parts.reserve(pointers.size());
    for (size_t i = 0; i < pointers.size(); i++) {
        if (!pointers[i] && lengths[i])
            fail(SID_E_ARG,
                 "segment " + std::to_string(i) + " is NULL, but has " + std::to_string(lengths[i]) + " elements");
        if (lengths[i] > UINT64_MAX - n) fail(SID_E_ARG, "the segments' lengths add up to more than 2^64 - 1");
        parts.push_back({pointer(pointers[i]), lengths[i]});
        n += lengths[i];
    }
}

void bind_buffers(py::module_ &m) {
    using py::arg;
    py::class_<Segments, std::shared_ptr<Segments>>(m, "Segments",
                                                    "A list of (pointer, length in elements): the parts of a group.")
        .def(py::init<const std::vector<Address> &, const std::vector<uint64_t> &>(), arg("pointers"), arg("lengths"))
        .def_readonly("n", &Segments::n)
        .def("table", [](const Segments &s) {
            return py::bytes(reinterpret_cast<const char *>(s.parts.data()), s.parts.size() * sizeof(sid_segment));
        });
    py::class_<Buffers>(m, "Buffers", "A group's segments, state, work and payload in the host's memory.")
        .def(py::init<std::shared_ptr<Segments>, Address, Address, Address>(), arg("segments").none(false),
             arg("state") = 0, arg("work") = 0, arg("payload") = 0)
        .def_property_readonly("segments", [](const Buffers &b) { return b.segments; })
        .def_property_readonly("state", [](const Buffers &b) { return address(b.state); })
        .def_property_readonly("work", [](const Buffers &b) { return address(b.work); })
        .def_property_readonly("payload", [](const Buffers &b) { return address(b.payload); });
    py::class_<DeviceBuffers>(m, "DeviceBuffers", "A group's segments, state, work and payload on a device.")
        .def(py::init<Address, uint32_t, Address, Address, Address>(), arg("table"), arg("n_segments"),
             arg("state") = 0, arg("work") = 0, arg("payload") = 0)
        .def_property_readonly("table", [](const DeviceBuffers &b) { return address(b.segs); })
        .def_readonly("n_segments", &DeviceBuffers::n_seg)
        .def_property_readonly("state", [](const DeviceBuffers &b) { return address(b.state); })
        .def_property_readonly("work", [](const DeviceBuffers &b) { return address(b.work); })
        .def_property_readonly("payload", [](const DeviceBuffers &b) { return address(b.payload); });
    m.def(
        "checksum",
        [](const Segments &s, const string &dtype) {
            const sid_dtype d = dtype_of(dtype);
            return without_gil([&] { return sid_checksum(s.parts.data(), s.count(), d); });
        },
        arg("segments"), arg("dtype"));
    m.def(
        "scale",
        [](const Segments &s, const string &dtype, float factor) {
            const sid_dtype d = dtype_of(dtype);
            check(without_gil([&] { return sid_scale(s.parts.data(), s.count(), d, factor); }));
        },
        arg("segments"), arg("dtype"), arg("factor"));

    py::class_<sid_stats>(m, "Stats", "What the last encode counted.")
        .def_readonly("count", &sid_stats::count)
        .def_readonly("found", &sid_stats::found)
        .def_readonly("nonfinite", &sid_stats::nonfinite)
        .def_readonly("threshold", &sid_stats::threshold)
        .def_readonly("stages", &sid_stats::stages)
        .def_readonly("passes", &sid_stats::passes);
    m.attr("stats_bytes") = sizeof(sid_stats);
    m.def("read_stats", read_stats, arg("data"));
    m.attr("state_header_bytes") = state_header_bytes();
    m.attr("state_lasting") = state_lasting();
    m.attr("extra_unit_bytes") = static_cast<int>(SID_EXTRA_UNIT);
    m.attr("max_vectors") = static_cast<int>(SID_MAX_VECTORS);
}

} // namespace binding
