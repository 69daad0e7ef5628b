// elastic_driver._native: the Python bindings. Arguments are checked here, and work is done without the GIL.
#include <cstdio>  // nanobind's headers rely on it, and Python.h does not include it under the stable ABI

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "arithmetic/reduce.h"
#include "errors.h"
#include "gloo/context_group.h"
#include "python/engine_module.h"

namespace nb = nanobind;
using elastic::ContextGroup;
using elastic::Seconds;

namespace {

// A C-contiguous buffer, held for as long as this lives.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

Seconds checked(double timeout_s) {
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s must be above 0");
  return Seconds(timeout_s);
}

using Plan = std::tuple<std::string, std::vector<int>, int>;

// Shared with an engine, whose thread may be using it when Python drops it.
std::shared_ptr<ContextGroup> make(const std::vector<Plan>& groups, const std::string& host, const nb::bytes& key,
                                   const std::string& purpose, std::pair<int, int> ports, double host_timeout_s) {
  if (!(host_timeout_s >= 0)) throw std::invalid_argument("host_timeout_s must not be below 0");
  elastic::Reach reach;
  reach.limit = Seconds(host_timeout_s);
  std::vector<elastic::GroupPlan> plans;
  for (const auto& [name, members, index] : groups) plans.push_back({name, members, index});
  return std::make_shared<ContextGroup>(std::move(plans), host, std::string(key.c_str(), key.size()), purpose,
                                        elastic::port_range(ports.first, ports.second), std::move(reach));
}

nb::bytes prepare(ContextGroup& self) {
  std::string blob;
  {
    const nb::gil_scoped_release unlocked;
    blob = self.prepare();
  }
  return nb::bytes(blob.data(), blob.size());
}

void connect_peers(ContextGroup& self, const std::vector<nb::bytes>& blobs, double timeout_s) {
  const Seconds timeout = checked(timeout_s);
  std::vector<std::string> copies;
  for (const nb::bytes& blob : blobs) copies.emplace_back(blob.c_str(), blob.size());
  const nb::gil_scoped_release unlocked;
  self.connect(copies, timeout);
}

void allreduce(ContextGroup& self, const std::string& group, nb::handle buffer, const std::string& dtype,
               const std::string& op, double timeout_s) {
  const Seconds timeout = checked(timeout_s);
  const elastic::DType type = elastic::parse_dtype(dtype);
  const elastic::ReduceOp operation = elastic::parse_op(op);
  const Buffer data(buffer, true);
  const size_t width = elastic::element_size(type);
  if (data.size() % width != 0) {
    throw std::invalid_argument("a buffer of " + std::to_string(data.size()) + " bytes is no array of " + dtype);
  }
  if (reinterpret_cast<uintptr_t>(data.data()) % width != 0) {
    throw std::invalid_argument("the buffer is not aligned for " + dtype);
  }
  const nb::gil_scoped_release unlocked;
  self.allreduce(group, data.data(), data.size() / width, type, operation, timeout);
}

void broadcast(ContextGroup& self, const std::string& group, nb::handle buffer, int root, double timeout_s) {
  const Seconds timeout = checked(timeout_s);
  const Buffer data(buffer, true);
  const nb::gil_scoped_release unlocked;
  self.broadcast(group, data.data(), data.size(), root, timeout);
}

void allgather(ContextGroup& self, const std::string& group, nb::handle input, nb::handle output,
               const std::vector<size_t>& counts, double timeout_s) {
  const Seconds timeout = checked(timeout_s);
  const Buffer in(input, false);
  const Buffer out(output, true);
  size_t total = 0;
  for (const size_t count : counts) {
    if (count > out.size() - total) throw std::invalid_argument("the counts add up to more than the output's bytes");
    total += count;
  }
  const auto index = static_cast<size_t>(self.group_index(group));
  if (index >= counts.size() || in.size() != counts[index]) {
    throw std::invalid_argument("the input has " + std::to_string(in.size()) + " bytes, not this member's count");
  }
  if (out.size() != total) {
    throw std::invalid_argument("the output has " + std::to_string(out.size()) + " bytes, the counts add up to " +
                                std::to_string(total));
  }
  const auto* const from = static_cast<char*>(in.data());
  const auto* const to = static_cast<char*>(out.data());
  const auto* const own = to + std::accumulate(counts.begin(), counts.begin() + index, size_t{0});
  if (from != own && in.size() != 0 && from < to + out.size() && from + in.size() > to) {
    throw std::invalid_argument("the input overlaps the output, and not at its own place");
  }
  const nb::gil_scoped_release unlocked;
  self.allgather(group, in.data(), out.data(), counts, timeout);
}

}  // namespace

// Every CPython has one of the two, the latter since 3.13. The stable ABI of 3.12 guarantees neither.
extern "C" {
__attribute__((weak)) int _Py_IsFinalizing(void);
__attribute__((weak)) int Py_IsFinalizing(void);
}

namespace {

bool finalizing() {
  if (Py_IsFinalizing != nullptr) return Py_IsFinalizing() != 0;
  return _Py_IsFinalizing != nullptr && _Py_IsFinalizing() != 0;
}

void park_while_finalizing() {
  while (finalizing() && gettid() != getpid()) pause();
}

using SetTerminate = std::terminate_handler (*)(std::terminate_handler) noexcept;

// The set_terminate of libstdc++, if that is loaded and is not the library that this is built with: a wheel contains a
// C++ library of its own.
SetTerminate foreign_set_terminate() {
  void* const library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  const auto found = reinterpret_cast<SetTerminate>(dlsym(library, "_ZSt13set_terminatePFvvE"));
  return found == static_cast<SetTerminate>(&std::set_terminate) ? nullptr : found;
}

std::terminate_handler former_terminate = nullptr;
std::terminate_handler former_foreign_terminate = nullptr;

// When the interpreter ends, it ends each thread that acquires the GIL, by a C library exception that noexcept C++
// frames, of this module or of PyTorch, turn into std::terminate. Then a thread that is no longer needed would crash
// the process, so it is paused instead.
void park_threads_at_exit() {
  if (former_terminate == nullptr) {
    former_terminate = std::set_terminate([] {
      park_while_finalizing();
      former_terminate();
    });
  }
  if (former_foreign_terminate != nullptr) return;
  if (const auto set = foreign_set_terminate()) {
    former_foreign_terminate = set([] {
      park_while_finalizing();
      former_foreign_terminate();
    });
  }
}

}  // namespace

NB_MODULE(_native, module) {
  module.def("park_threads_at_exit", &park_threads_at_exit);
  // Contexts that live until the interpreter's end, and those that a forked child inherits, are not leaks.
  nb::set_leak_warnings(false);
  module.doc() = "The engine and the Gloo contexts of one worker in one round; see elastic_driver/_native.pyi.";
  const nb::object base = nb::exception<elastic::CollectiveError>(module, "CollectiveError", PyExc_RuntimeError);
  nb::exception<elastic::AbortedError>(module, "AbortedError", base.ptr());
  nb::exception<elastic::UnreachableError>(module, "UnreachableError", base.ptr());
  nb::exception<elastic::CollectiveTimeout>(module, "CollectiveTimeout", base.ptr());

  using nb::arg;
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<ContextGroup>(module, "ContextGroup")
      .def(nb::new_(&make), arg("groups"), nb::kw_only(), arg("host"), arg("key") = nb::bytes("", 0),
           arg("purpose") = "", arg("ports") = std::pair(0, 0), arg("host_timeout_s") = 0.0)
      .def_prop_ro("unreachable", &ContextGroup::unreachable)
      .def("prepare", &prepare)
      .def("connect", &connect_peers, arg("blobs"), arg("timeout_s"))
      .def("allreduce", &allreduce, arg("group"), arg("buffer"), arg("dtype"), arg("op"), arg("timeout_s"))
      .def("broadcast", &broadcast, arg("group"), arg("buffer"), arg("root"), arg("timeout_s"))
      .def("allgather", &allgather, arg("group"), arg("input"), arg("output"), arg("counts"), arg("timeout_s"))
      .def(
          "barrier",
          [](ContextGroup& self, const std::string& group, double timeout_s) {
            self.barrier(group, checked(timeout_s));
          },
          arg("group"), arg("timeout_s"), unlocked)
      .def("abort", &ContextGroup::abort, arg("reason"), unlocked)
      .def("close", &ContextGroup::close, unlocked);
  elastic::bind_engine(module);
}
