// What the parts of the binding share: errors and memory. sidcomp/_core.pyi is the interface that they make together.
// Pointers and streams are integers, and no torch header is included, so one build serves every torch. Calls that touch
// gradients release the GIL.
#ifndef SID_BINDING_COMMON_HPP
#define SID_BINDING_COMMON_HPP

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "sidcomp.h"

namespace binding {

namespace py = pybind11;
using std::string;

// ---- errors ------------------------------------------------------------------------------------------------------

// Raises the exception of a status. culprit: the index of the payload or rank at fault.
[[noreturn]] void fail(int status, const string &text, std::optional<uint32_t> culprit = {});
void check(sid_status s, const sid_error &err = {}, std::optional<uint32_t> culprit = {});

string joined(const std::vector<string> &names); // for a message: "a, b, c", or "nothing"

// ---- calls -------------------------------------------------------------------------------------------------------

template <class F> auto without_gil(F call) {
    py::gil_scoped_release release;
    return call();
}

// call(&err) without the GIL; raises what it returns.
template <class F> void run(F call) {
    sid_error err{};
    const sid_status s = without_gil([&] { return call(&err); });
    check(s, err);
}

// ---- memory ------------------------------------------------------------------------------------------------------

struct FreeBlock {
    void operator()(void *p) const { ::operator delete(p, std::align_val_t{64}); }
};
using Block = std::unique_ptr<void, FreeBlock>; // starts at a multiple of 64, as the core wants it

inline Block make_block(size_t bytes) { return Block(::operator new(bytes, std::align_val_t{64})); }

} // namespace binding

#endif
