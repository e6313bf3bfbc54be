// The exceptions: one class for each status of the core.
#include <stdexcept>

#include "common.hpp"

namespace binding {

namespace {

struct ErrorClass {
    const char *name;
    sid_status status;
    const char *doc;
    PyObject **builtin; // also derives from
    PyObject *type;     // owned for ever: an exception may outlive the module
};

ErrorClass error_classes[] = {
    {"ArgumentError", SID_E_ARG, "An argument of the call is wrong.", &PyExc_ValueError, nullptr},
    {"ParameterError", SID_E_PARAM, "A codec's or memory's name or parameter is unknown or out of range.",
     &PyExc_ValueError, nullptr},
    {"SpaceError", SID_E_SPACE, "A block of memory is smaller than what was asked for.", &PyExc_ValueError, nullptr},
    {"CorruptPayloadError", SID_E_CORRUPT, "Payload bytes are not what an encoder writes.", nullptr, nullptr},
    {"MismatchError", SID_E_MISMATCH, "A sound payload, but of another plan, group or step.", nullptr, nullptr},
    {"UnsupportedError", SID_E_UNSUPPORTED, "This build, device or combination cannot do it.",
     &PyExc_NotImplementedError, nullptr},
    {"DeviceError", SID_E_DEVICE, "A CUDA call failed.", &PyExc_RuntimeError, nullptr},
    {"ExchangeError", SID_E_PEER, "An exchange failed: a peer has ended, hangs, or cannot be reached.",
     &PyExc_RuntimeError, nullptr},
};

} // namespace

void bind_errors(py::module_ &m) {
    const auto add = [&](const char *name, const char *doc, const py::tuple &bases, int status) {
        py::dict members;
        members["status"] = status;
        PyObject *type =
            PyErr_NewExceptionWithDoc((string("sidcomp._core.") + name).c_str(), doc, bases.ptr(), members.ptr());
        if (!type) throw py::error_already_set();
        m.add_object(name, py::reinterpret_borrow<py::object>(type));
        return type;
    };
    const py::handle base = add("SidcompError", "Base of every error of the core; `status` is the C status.",
                                py::make_tuple(py::handle(PyExc_Exception)), 0);
    for (ErrorClass &e : error_classes) {
        py::tuple bases = py::make_tuple(base);
        if (e.builtin) bases = py::make_tuple(base, py::handle(*e.builtin));
        e.type = add(e.name, e.doc, bases, e.status);
    }
}

void fail(int status, const string &text, std::optional<uint32_t> culprit) {
    for (const ErrorClass &e : error_classes) {
        if (e.status != status) continue;
        py::object error = py::reinterpret_borrow<py::object>(e.type)(text);
        if (culprit) error.attr("culprit") = *culprit;
        PyErr_SetObject(e.type, error.ptr());
        throw py::error_already_set();
    }
    throw std::runtime_error("sidcomp: status " + std::to_string(status) + ": " + text);
}

void check(sid_status s, const sid_error &err, std::optional<uint32_t> culprit) {
    if (s != SID_OK) fail(s, err.text[0] ? err.text : sid_status_text(s), culprit);
}

string joined(const std::vector<string> &names) {
    string text;
    for (const string &n : names) text += (text.empty() ? "" : ", ") + n;
    return text.empty() ? "nothing" : text;
}

} // namespace binding
