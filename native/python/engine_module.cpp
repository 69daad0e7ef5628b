// The Python bindings of the engine. Operations are passed as elastic_driver.worker.engine.Operation.
#include "python/engine_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "vitals/page.h"
#include "vitals/stacks.h"

namespace nb = nanobind;

namespace elastic {
namespace {

// Waits are sliced, so that signals are handled in between.
constexpr std::chrono::milliseconds kSlice{100};

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

Bytes bytes_array(void* data, size_t bytes, nb::handle owner) { return Bytes(data, {bytes}, owner); }

// Owners of operations' memory that are on their way back to Python: the engine releases them in a thread without the
// GIL. A lock-free stack, so that it is usable after a fork.
struct Owner {
  PyObject* object;
  Owner* next = nullptr;
};
std::atomic<Owner*> released{nullptr};

void release(Owner* owner) {
  owner->next = released.load();
  while (!released.compare_exchange_weak(owner->next, owner)) {
  }
}

// Drops the references that were released so far. With the GIL.
void free_released() {
  Owner* owner = released.exchange(nullptr);
  while (owner != nullptr) {
    const std::unique_ptr<Owner> last(owner);
    owner = owner->next;
    Py_DECREF(last->object);  // its destructor may run any code, also this module's
  }
}

std::shared_ptr<void> keep(nb::handle object) {
  if (object.is_none()) return nullptr;
  auto* const owner = new Owner{object.ptr()};
  Py_INCREF(object.ptr());
  return std::shared_ptr<Owner>(owner, release);
}

// Python's handle of an operation.
struct Handle {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Operation> operation;

  bool done() const { return engine->wait(operation, std::chrono::milliseconds(0)); }

  void wait() const {
    bool done = false;
    const vitals::Waits waits;
    {
      const nb::gil_scoped_release unlocked;
      done = engine->wait(operation, kSlice);
    }
    while (!done) {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      const nb::gil_scoped_release unlocked;
      done = engine->wait(operation, kSlice);
    }
    free_released();
    engine->check(operation);
  }

  // [(memory, rows, received), ...]: arrays that share the operation's memory, also with the arrays of other calls. So
  // callers cannot lose the outputs, and their order does not matter.
  nb::list outputs() const {
    nb::list found;
    for (const Operation::Output& output : operation->outputs) {
      auto share = std::make_unique<std::shared_ptr<char[]>>(output.memory);
      const nb::capsule owner(share.get(),
                              [](void* held) noexcept { delete static_cast<std::shared_ptr<char[]>*>(held); });
      char* const memory = share.release()->get();
      nb::list received;
      for (const int64_t rows : output.received) received.append(rows);
      found.append(nb::make_tuple(bytes_array(memory, output.bytes, owner), output.rows, nb::tuple(received)));
    }
    return found;
  }
};

int type_number(nb::handle name) {
  static const auto* const numbers = [] {
    auto* const made = new std::unordered_map<std::string, int>;
    for (int type = 0; type < kWireTypes; ++type) (*made)[wire_type_name(type)] = type;
    return made;
  }();
  const auto found = numbers->find(nb::cast<std::string>(name));
  if (found == numbers->end()) {
    throw std::invalid_argument("cannot use elements of type '" + nb::cast<std::string>(name) + "'");
  }
  return found->second;
}

Handle submit(const std::shared_ptr<Engine>& engine, nb::handle what) {
  Plan plan;
  const int kind = nb::cast<int>(what.attr("kind"));
  if (kind < 0 || kind >= kKinds) throw std::invalid_argument("there is no such kind of operation");
  plan.kind = static_cast<Kind>(kind);
  const bool reduces = plan.kind == Kind::kAllreduce || plan.kind == Kind::kReducescatter;
  if (reduces) {
    const int reduction = nb::cast<int>(what.attr("reduce_op"));
    if (reduction < 0 || reduction > static_cast<int>(Reduction::kProduct)) {
      throw std::invalid_argument("there is no such reduction");
    }
    plan.reduction = static_cast<Reduction>(reduction);
    if (plan.reduction == Reduction::kAdasum && plan.kind == Kind::kReducescatter) {
      throw std::invalid_argument("cannot reducescatter with Adasum");
    }
    plan.prescale = nb::cast<double>(what.attr("prescale"));
    plan.postscale = nb::cast<double>(what.attr("postscale"));
  }
  if (plan.kind == Kind::kBroadcast) plan.root = nb::cast<int>(what.attr("root"));
  plan.process_set = nb::cast<int>(what.attr("process_set"));
  plan.device = nb::cast<int>(what.attr("device"));
  plan.own = nb::cast<bool>(what.attr("own"));
  std::vector<Memory> memory;
  std::vector<int64_t> sizes, rows;
  for (const nb::handle spec : what.attr("tensors")) {
    TensorPlan tensor;
    tensor.type = type_number(spec.attr("dtype"));
    if (reduces && tensor.type >= kReducible) {
      throw std::invalid_argument("cannot reduce elements of type " + std::string(wire_type_name(tensor.type)));
    }
    for (const nb::handle extent : spec.attr("shape")) tensor.shape.push_back(nb::cast<int64_t>(extent));
    if ((plan.sized() || plan.kind == Kind::kReducescatter) && tensor.shape.empty()) {
      throw std::invalid_argument("cannot " + std::string(kind_name(plan.kind)) +
                                  " a scalar: it has no first dimension");
    }
    if (plan.sized()) {
      rows.push_back(tensor.shape[0]);
      if (plan.kind == Kind::kAllgather) sizes.push_back(tensor.shape[0]);
      tensor.shape.erase(tensor.shape.begin());
    }
    const auto input = nb::cast<uintptr_t>(spec.attr("address")), output = nb::cast<uintptr_t>(spec.attr("output"));
    memory.push_back({reinterpret_cast<const void*>(input), reinterpret_cast<void*>(output)});
    plan.tensors.push_back(std::move(tensor));
  }
  if (plan.kind == Kind::kAlltoall) {
    size_t tensor = 0;
    for (const nb::handle splits : what.attr("splits")) {
      int64_t total = 0;
      for (const nb::handle part : splits) {
        sizes.push_back(nb::cast<int64_t>(part));
        total += sizes.back();
      }
      if (tensor >= rows.size() || total != rows[tensor++]) {
        throw std::invalid_argument("the splits do not add up to the tensor's rows");
      }
    }
  }
  for (const int64_t size : sizes) {
    if (size < 0) throw std::invalid_argument("sizes and splits cannot be negative");
  }
  const auto name = nb::cast<std::string>(what.attr("name"));
  free_released();
  // No signal handler runs from here to the end, so the engine has both the operation and its memory's owner, or
  // neither.
  std::shared_ptr<void> owner = keep(what.attr("keep"));
  const nb::gil_scoped_release unlocked;
  return {engine, engine->submit(name, std::move(plan), std::move(memory), std::move(sizes), std::move(owner))};
}

std::shared_ptr<Engine> make(int rank, int size, size_t fusion_bytes, double stall_warn_s, double stall_fail_s,
                             double timeout_s, bool shared_memory, bool direct_reads, const std::string& machine,
                             const nb::bytes& key, const std::string& purpose, double host_timeout_s) {
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s must be above 0");
  if (!(host_timeout_s >= 0)) throw std::invalid_argument("host_timeout_s must not be below 0");
  EngineOptions options;
  options.fusion_bytes = fusion_bytes;
  options.patience = {stall_warn_s, stall_fail_s};
  options.collective_timeout = Seconds(timeout_s);
  options.shared_memory = shared_memory;
  options.direct_reads = direct_reads;
  options.machine = machine;
  options.key.assign(key.c_str(), key.size());
  options.purpose = purpose;
  options.reach.limit = Seconds(host_timeout_s);
  return std::make_shared<Engine>(rank, size, options);
}

// Returns the operation that Python has to run: (the memory's owner or None, turn, kind, reduction, root, prescale,
// postscale, process set, [(dtype, shape), ...], sizes); None if there is none.
nb::object next_turn(const std::shared_ptr<Engine>& engine, double timeout_s) {
  std::optional<Engine::Turn> turn;
  {
    const nb::gil_scoped_release unlocked;
    turn = engine->next_turn(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
  }
  if (!turn) return nb::none();
  const Plan& plan = *turn->plan;
  nb::list tensors;
  for (const TensorPlan& tensor : plan.tensors) {
    nb::list shape;
    for (const int64_t extent : tensor.shape) shape.append(extent);
    tensors.append(nb::make_tuple(wire_type_name(tensor.type), nb::tuple(shape)));
  }
  nb::list sizes;
  for (const int64_t size : turn->sizes) sizes.append(size);
  nb::object owner = nb::none();
  if (turn->operation && turn->owner) owner = nb::borrow(static_cast<Owner*>(turn->owner.get())->object);
  return nb::make_tuple(owner, nb::cast(*turn), static_cast<int>(plan.kind), static_cast<int>(plan.reduction),
                        plan.root, plan.prescale, plan.postscale, plan.process_set, tensors, sizes);
}

nb::object allocate(Engine& engine, size_t bytes) {
  struct Held {
    std::shared_ptr<SharedSegment> segment;
    void* memory;
  };
  auto held = std::make_unique<Held>();
  held->memory = engine.allocate(bytes, held->segment);
  if (held->memory == nullptr) return nb::none();
  void* const memory = held->memory;
  const nb::capsule owner(held.release(), [](void* pointer) noexcept {
    const std::unique_ptr<Held> last(static_cast<Held*>(pointer));
    last->segment->release(last->memory);
  });
  return nb::cast(bytes_array(memory, bytes, owner));
}

// A plain C function, not one of nanobind's: when the interpreter ends, a thread that acquires the GIL is unwound
// (pthread_exit), which would call std::terminate in a frame of nanobind or with a destructor.
PyObject* asked_for_stacks(PyObject* /*module*/, PyObject* /*unused*/) {
  for (;;) {
    PyThreadState* const unlocked = PyEval_SaveThread();
    stacks::wait();
    PyEval_RestoreThread(unlocked);
    // Only now, with the GIL: until it was acquired, the previous handler may have answered a second signal.
    const int signal = stacks::claim();
    if (signal != 0) return PyLong_FromLong(signal);
  }
}

PyMethodDef of_pythons_kind[] = {{"stacks_asked", asked_for_stacks, METH_NOARGS, nullptr}, {}};

}  // namespace

void bind_engine(nb::module_& module) {
  nb::exception<MismatchError>(module, "MismatchError", PyExc_RuntimeError);
  nb::exception<DuplicateNameError>(module, "DuplicateNameError", PyExc_RuntimeError);
  using nb::arg;
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  module.def("vitals_open", &vitals::open, arg("path"), unlocked);
  module.def("vitals_close", &vitals::close, unlocked);
  module.def("vitals_round", &vitals::enter_round, arg("round_id"), arg("rank"));
  module.def("vitals_step", &vitals::step);
  module.def("vitals_commit", &vitals::commit, arg("commits"));
  module.def("vitals_dumps_at", &vitals::dumps_at, arg("signal"));
  module.def("stacks_take_over", &stacks::take_over, arg("signal"));
  if (PyModule_AddFunctions(module.ptr(), of_pythons_kind) != 0) throw nb::python_error();
  module.def("stacks_answered", &stacks::answered, arg("signal"));
  module.def("stacks_die_of", &stacks::die_of, arg("signal"));
  nb::class_<Handle>(module, "Handle")
      .def("done", &Handle::done)
      .def("wait", &Handle::wait)
      .def("outputs", &Handle::outputs)
      .def_prop_ro("last_joined", [](const Handle& self) { return self.operation->last_joined; });
  nb::class_<Engine::Turn>(module, "Turn");
  nb::class_<Engine>(module, "Engine")
      .def("next_turn", &next_turn, arg("timeout_s"))
      .def("conclude", &Engine::conclude, arg("turn"), arg("error"), unlocked)
      .def(nb::new_(&make), arg("rank"), arg("size"), nb::kw_only(), arg("fusion_bytes"), arg("stall_warn_s"),
           arg("stall_fail_s"), arg("timeout_s"), arg("shared_memory"), arg("direct_reads"), arg("machine") = "",
           arg("key") = nb::bytes("", 0), arg("purpose") = "", arg("host_timeout_s") = 0.0)
      .def(
          "prepare",
          [](Engine& self, const std::string& host, std::pair<int, int> ports) {
            std::string blob;
            {
              const nb::gil_scoped_release released;
              blob = self.prepare(host, elastic::port_range(ports.first, ports.second));
            }
            return nb::bytes(blob.data(), blob.size());
          },
          arg("host"), arg("ports") = std::pair(0, 0))
      .def(
          "connect",
          [](Engine& self, const nb::bytes& where, double timeout_s) {
            const std::string copy(where.c_str(), where.size());
            const nb::gil_scoped_release released;
            self.connect(copy, Seconds(timeout_s));
          },
          arg("where"), arg("timeout_s"))
      .def(
          "connect_contexts",
          [](Engine& self, ContextGroup& contexts, double timeout_s) {
            const nb::gil_scoped_release released;
            const std::string own = contexts.prepare();
            contexts.connect(self.gather(own, ContextGroup::kOwnBytes, Seconds(timeout_s)), Seconds(timeout_s));
          },
          arg("contexts"), arg("timeout_s"))
      .def_prop_ro("machines", &Engine::machines)
      .def_prop_ro("unshared", &Engine::unshared)
      .def("start", &Engine::start, unlocked)
      .def("add_process_set", &Engine::add_process_set, arg("number"), arg("ranks"), arg("contexts").none(), unlocked)
      .def(
          "remove_process_set",
          [](const std::shared_ptr<Engine>& self, int number) {
            const nb::gil_scoped_release released;
            return Handle{self, self->remove_process_set(number)};
          },
          arg("number"))
      .def("submit", &submit, arg("operation"))
      .def(
          "leave",
          [](const std::shared_ptr<Engine>& self, int step) {
            if (step != 0 && step != 1) throw std::invalid_argument("leaving has the steps 0 and 1");
            const nb::gil_scoped_release released;
            return Handle{self, self->leave(step)};
          },
          arg("step"))
      .def(
          "settle",
          [](Engine& self, int process_set) {
            const vitals::Waits waits;
            bool done = false;
            while (!done) {
              if (PyErr_CheckSignals() != 0) throw nb::python_error();
              const nb::gil_scoped_release unlocked;
              done = self.settled(process_set, kSlice);
            }
          },
          arg("process_set"))
      .def(
          "quiesce",
          [](Engine& self, double limit_s) {
            return self.quiesce(std::chrono::milliseconds(static_cast<int64_t>(limit_s * 1e3)));
          },
          arg("limit_s"), unlocked)
      .def("allocate", &allocate, arg("nbytes"))
      .def("progress", &Engine::progress, unlocked)
      .def_prop_ro("carries_out", &Engine::carries_out)
      .def_prop_ro("own_finished", &Engine::own_finished)
      .def_prop_ro("unreachable", &Engine::unreachable)
      .def(
          "start_timeline",
          [](Engine& self, const std::string& path, bool mark_cycles) {
            try {
              const nb::gil_scoped_release released;
              self.timeline().start(path, self.rank(), mark_cycles);
            } catch (const std::system_error& error) {
              errno = error.code().value();
              PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
              throw nb::python_error();
            }
          },
          arg("path"), arg("mark_cycles"))
      .def(
          "stop_timeline", [](Engine& self) { self.timeline().stop(); }, unlocked)
      .def("abort", &Engine::abort, arg("reason"), unlocked)
      .def("close", &Engine::close, unlocked);
}

}  // namespace elastic
