#include "engine/plan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "errors.h"
#include "net/wire.h"

namespace elastic {
namespace {

constexpr const char* kKindNames[kKinds] = {"allreduce",     "allgather", "broadcast", "alltoall",
                                            "reducescatter", "barrier",   "join",      "leave"};
constexpr const char* kReductionNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};

// Tensors of at least this size do not benefit from fusion: they would only be copied.
constexpr size_t kFusedTensorBytes = 256 * 1024;
// The limit of an array's size.
constexpr uint64_t kMostTensorBytes = PTRDIFF_MAX;
constexpr const char* kTooLarge = "its tensors have more bytes than memory has addresses";

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

void Plan::check() const {
  const bool reduces = kind == Kind::kAllreduce || kind == Kind::kReducescatter;
  uint64_t total = 0;
  for (const TensorPlan& tensor : tensors) {
    if (tensor.type < 0 || tensor.type >= kWireTypes) throw std::invalid_argument("there is no such element type");
    if (reduces && tensor.type >= kReducible) {
      throw std::invalid_argument("cannot reduce elements of type " + std::string(wire_type_name(tensor.type)));
    }
    if (reduces && reduction == Reduction::kAdasum && tensor.type > static_cast<int>(DType::kFloat64)) {
      throw std::invalid_argument("Adasum is for floating point only, not for " +
                                  std::string(wire_type_name(tensor.type)));
    }
    if (kind == Kind::kReducescatter && tensor.shape.empty()) {
      throw std::invalid_argument("cannot reducescatter a scalar: it has no first dimension");
    }
    uint64_t bytes = wire_type_size(tensor.type);
    for (const int64_t extent : tensor.shape) {
      if (extent < 0) throw std::invalid_argument("an extent of a tensor is negative");
      // Also if another extent is 0: the rows of such a tensor may have any number of bytes.
      if (extent > 0 && bytes > kMostTensorBytes / static_cast<uint64_t>(extent))
        throw std::invalid_argument(kTooLarge);
      bytes *= static_cast<uint64_t>(std::max<int64_t>(extent, 1));
    }
    total += bytes;
    if (total > kMostTensorBytes) throw std::invalid_argument(kTooLarge);
  }
}

bool operator==(const TensorPlan& one, const TensorPlan& other) {
  return one.type == other.type && one.shape == other.shape;
}

bool operator==(const Plan& one, const Plan& other) {
  const auto alike = [](double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0; };
  return one.kind == other.kind && one.reduction == other.reduction && one.root == other.root &&
         alike(one.prescale, other.prescale) && alike(one.postscale, other.postscale) &&
         one.process_set == other.process_set && one.device == other.device && one.own == other.own &&
         one.tensors == other.tensors;
}

bool can_be_fused(const Plan& plan) {
  return plan.kind == Kind::kAllreduce && plan.device == 0 && plan.tensors.size() == 1 &&
         plan.reduction != Reduction::kAdasum && plan.bytes(0) < kFusedTensorBytes;
}

bool fuse_with(const Plan& one, const Plan& other) {
  return one.reduction == other.reduction && one.prescale == other.prescale && one.postscale == other.postscale &&
         one.process_set == other.process_set && one.tensors[0].type == other.tensors[0].type;
}

bool sizes_fit(const Plan& plan, const std::vector<int64_t>& sizes, size_t given_by, size_t members) {
  const size_t tensors = plan.tensors.size(), each = plan.kind == Kind::kAlltoall ? members : 1;
  if (!plan.sized()) return sizes.empty();
  if (sizes.size() != given_by * tensors * each) return false;
  for (size_t tensor = 0; tensor < tensors; ++tensor) {
    uint64_t rows = 0;
    for (size_t giver = 0; giver < given_by; ++giver) {
      for (size_t part = 0; part < each; ++part) {
        const int64_t size = sizes[(giver * tensors + tensor) * each + part];
        if (size < 0) return false;
        rows += static_cast<uint64_t>(size);
        if (rows > kMostTensorBytes) return false;
      }
    }
    const uint64_t row = plan.bytes(tensor);
    if (row != 0 && rows > kMostTensorBytes / row) return false;
  }
  return true;
}

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
  writer.number(own ? 1 : 0);
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
  plan.own = reader.number() != 0;
  const uint64_t count = reader.number();
  for (uint64_t i = 0; i < count; ++i) {
    TensorPlan tensor;
    tensor.type = reader.small_number();
    const uint64_t dimensions = reader.number();
    for (uint64_t d = 0; d < dimensions; ++d) tensor.shape.push_back(reader.size());
    plan.tensors.push_back(std::move(tensor));
  }
  try {
    plan.check();
  } catch (const std::invalid_argument& error) {
    throw CollectiveError("cannot read a peer's message: " + std::string(error.what()));
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
