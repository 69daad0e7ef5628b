// What the members of an operation must agree on, and the words for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "arithmetic/reduce.h"

namespace elastic {

// The numbers are those of elastic_driver.worker.engine.Kind.
enum class Kind : uint8_t { kAllreduce, kAllgather, kBroadcast, kAlltoall, kReducescatter, kBarrier, kJoin, kLeave };
constexpr int kKinds = 8;
const char* kind_name(Kind kind);

// Horovod's numbers: 0 average, 1 sum, 2 Adasum, 3 minimum, 4 maximum, 5 product.
enum class Reduction : uint8_t { kAverage, kSum, kAdasum, kMin, kMax, kProduct };
const char* reduction_name(Reduction reduction);
// The kernel's operation; that of Adasum, which has no kernel, is the sum's.
ReduceOp kernel_op(Reduction reduction);

// Element types by number: the first eight are those of DType, which alone are reduced.
constexpr int kWireTypes = 13;
constexpr int kReducible = 8;
const char* wire_type_name(int type);
size_t wire_type_size(int type);

// One tensor of an operation, without its memory.
struct TensorPlan {
  int type;
  std::vector<int64_t> shape;  // where plans are sized: without the first dimension
};

// That on which members agree, but for a name.
struct Plan {
  Kind kind;
  Reduction reduction = Reduction::kSum;
  int root = 0;  // of a broadcast; of a leave: its step, see Engine::leave()
  double prescale = 1, postscale = 1;
  int process_set = 0;
  // Not 0: the memory is a device's, and whoever asked runs the operation himself, when it is its turn.
  int device = 0;
  // One of the library's own: nothing that a user can write is paired with it.
  bool own = false;
  std::vector<TensorPlan> tensors;

  std::string encode() const;
  // Throws CollectiveError, also for what check() refuses.
  static Plan decode(std::string_view bytes);
  // Throws std::invalid_argument for what no rank can run: elements that cannot be reduced, negative extents, and more
  // bytes than memory has addresses.
  void check() const;
  // Whether the first dimensions travel with each submission, because members may differ in them: for an allgather one
  // for each tensor, for an alltoall as many as there are members for each tensor.
  bool sized() const { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }
  // Elements of a tensor; of one row of it where the plan is sized. Of a plan that check() has passed.
  size_t elements(size_t tensor) const;
  size_t bytes(size_t tensor) const { return elements(tensor) * wire_type_size(tensors[tensor].type); }
};

// Bit for bit.
bool operator==(const TensorPlan& one, const TensorPlan& other);
bool operator==(const Plan& one, const Plan& other);

// Whether small tensors of these operations may run together.
bool can_be_fused(const Plan& plan);
bool fuse_with(const Plan& one, const Plan& other);

// Whether each tensor has as many sizes as it must, none of them negative, and its rows, of all members together, have
// an addressable number of bytes. `sizes`: of so many members; `members`: of the whole set, for an alltoall's splits.
bool sizes_fit(const Plan& plan, const std::vector<int64_t>& sizes, size_t given_by, size_t members);

// Of one member's own tensors in it; `sizes`: its own, see Plan::sized().
size_t payload_bytes(const Plan& plan, const std::vector<int64_t>& sizes);

// What is wrong when two ranks' plans differ, in one sentence that names both ranks; "" when nothing is.
std::string difference(const Plan& one, int one_rank, const Plan& other, int other_rank);

}  // namespace elastic
