#include "engine/plan.h"

#include <sstream>
#include <stdexcept>

#include "errors.h"
#include "net/wire.h"

namespace elastic {
namespace {

constexpr const char* kKindNames[kKinds] = {"allreduce",     "allgather", "broadcast", "alltoall",
                                            "reducescatter", "barrier",   "join",      "leave"};
constexpr const char* kReductionNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};

struct WireType {
  const char* name;
  size_t size;
};
constexpr WireType kTypes[kWireTypes] = {
    {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}, {"int8", 1},      {"uint8", 1},       {"int32", 4},
    {"int64", 8},   {"int16", 2},    {"uint16", 2},  {"bool", 1},    {"complex64", 8}, {"complex128", 16},
};

std::string shape_text(const TensorPlan& tensor, bool sized) {
  std::string text = sized ? "(rows" : "(";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    text += (i == 0 && !sized ? "" : ", ") + std::to_string(tensor.shape[i]);
  }
  return text + (!sized && tensor.shape.size() == 1 ? ",)" : ")");
}

template <typename T>
std::string disagree(const char* what, const T& one, int one_rank, const T& other, int other_rank) {
  std::ostringstream text;
  text << "rank " << one_rank << " has " << what << " " << one << ", rank " << other_rank << " has " << what << " "
       << other;
  return text.str();
}

}  // namespace

const char* kind_name(Kind kind) { return kKindNames[static_cast<int>(kind)]; }

const char* reduction_name(Reduction reduction) { return kReductionNames[static_cast<int>(reduction)]; }

ReduceOp kernel_op(Reduction reduction) {
  switch (reduction) {
    case Reduction::kAverage:
      return ReduceOp::kAverage;
    case Reduction::kSum:
    case Reduction::kAdasum:
      return ReduceOp::kSum;
    case Reduction::kMin:
      return ReduceOp::kMin;
    case Reduction::kMax:
      return ReduceOp::kMax;
    case Reduction::kProduct:
      return ReduceOp::kProduct;
  }
  throw std::invalid_argument("unknown reduction");
}

const char* wire_type_name(int type) { return kTypes[type].name; }

size_t wire_type_size(int type) { return kTypes[type].size; }

size_t Plan::elements(size_t tensor) const {
  size_t count = 1;
  for (const int64_t extent : tensors[tensor].shape) count *= static_cast<size_t>(extent);
  return count;
}

std::string Plan::encode() const {
  Writer writer;
  writer.number(static_cast<uint64_t>(kind));
  writer.number(static_cast<uint64_t>(reduction));
  writer.number(static_cast<uint64_t>(root));
  writer.real(prescale);
  writer.real(postscale);
  writer.number(static_cast<uint64_t>(process_set));
  writer.number(static_cast<uint64_t>(device));
  writer.number(tensors.size());
  for (const TensorPlan& tensor : tensors) {
    writer.number(static_cast<uint64_t>(tensor.type));
    writer.number(tensor.shape.size());
    for (const int64_t extent : tensor.shape) writer.number(static_cast<uint64_t>(extent));
  }
  return writer.take();
}

Plan Plan::decode(std::string_view bytes) {
  Reader reader(bytes);
  Plan plan;
  const uint64_t kind = reader.number(), reduction = reader.number();
  if (kind >= kKinds || reduction > static_cast<uint64_t>(Reduction::kProduct)) {
    throw CollectiveError("cannot read a peer's message: it names no operation");
  }
  plan.kind = static_cast<Kind>(kind);
  plan.reduction = static_cast<Reduction>(reduction);
  plan.root = reader.small_number();
  plan.prescale = reader.real();
  plan.postscale = reader.real();
  plan.process_set = reader.small_number();
  plan.device = reader.small_number();
  const uint64_t count = reader.number();
  for (uint64_t i = 0; i < count; ++i) {
    TensorPlan tensor;
    tensor.type = reader.small_number();
    if (tensor.type < 0 || tensor.type >= kWireTypes) {
      throw CollectiveError("cannot read a peer's message: it names no element type");
    }
    const uint64_t dimensions = reader.number();
    for (uint64_t d = 0; d < dimensions; ++d) tensor.shape.push_back(static_cast<int64_t>(reader.number()));
    plan.tensors.push_back(std::move(tensor));
  }
  return plan;
}

size_t payload_bytes(const Plan& plan, const std::vector<int64_t>& sizes) {
  const size_t each = plan.sized() && !plan.tensors.empty() ? sizes.size() / plan.tensors.size() : 0;
  size_t bytes = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    int64_t rows = plan.sized() ? 0 : 1;
    for (size_t part = 0; part < each; ++part) rows += sizes[i * each + part];
    bytes += plan.bytes(i) * static_cast<size_t>(rows);
  }
  return bytes;
}

std::string difference(const Plan& one, int one_rank, const Plan& other, int other_rank) {
  const auto say = [&](const char* what, const auto& a, const auto& b) {
    return disagree(what, a, one_rank, b, other_rank);
  };
  if (one.kind != other.kind) {
    return say("operation", std::string(kind_name(one.kind)), std::string(kind_name(other.kind)));
  }
  if (one.tensors.size() != other.tensors.size()) {
    return say("number of tensors", one.tensors.size(), other.tensors.size());
  }
  for (size_t i = 0; i < one.tensors.size(); ++i) {
    const TensorPlan &a = one.tensors[i], &b = other.tensors[i];
    if (a.type != b.type) return say("dtype", wire_type_name(a.type), wire_type_name(b.type));
    if (a.shape != b.shape) return say("shape", shape_text(a, one.sized()), shape_text(b, other.sized()));
  }
  if (one.device != other.device) {
    return say("memory on the", std::string(one.device == 0 ? "CPU" : "GPU"),
               std::string(other.device == 0 ? "CPU" : "GPU"));
  }
  if (one.kind == Kind::kBroadcast && one.root != other.root) return say("root rank", one.root, other.root);
  if (one.reduction != other.reduction) {
    return say("op", reduction_name(one.reduction), reduction_name(other.reduction));
  }
  if (one.prescale != other.prescale) return say("prescale_factor", one.prescale, other.prescale);
  if (one.postscale != other.postscale) return say("postscale_factor", one.postscale, other.postscale);
  return "";
}

}  // namespace elastic
