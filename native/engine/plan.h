// The part of an operation on which its members must agree, and its names for messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "arithmetic/reduce.h"

namespace elastic {

// The same numbers as in elastic_driver.worker.engine.Kind.
enum class Kind : uint8_t { kAllreduce, kAllgather, kBroadcast, kAlltoall, kReducescatter, kBarrier, kJoin, kLeave };
constexpr int kKinds = 8;
const char* kind_name(Kind kind);

// Horovod's numbers: 0 average, 1 sum, 2 Adasum, 3 minimum, 4 maximum, 5 product.
enum class Reduction : uint8_t { kAverage, kSum, kAdasum, kMin, kMax, kProduct };
const char* reduction_name(Reduction reduction);
// The kernel's operation; for Adasum, which has no kernel, it is the sum.
ReduceOp kernel_op(Reduction reduction);

// Element types by number: the first eight are those of DType; only these can be reduced.
constexpr int kWireTypes = 13;
constexpr int kReducible = 8;
const char* wire_type_name(int type);
size_t wire_type_size(int type);

// A tensor of an operation, without its memory.
struct TensorPlan {
  int type;
  std::vector<int64_t> shape;  // without the first dimension if the plan is sized
};

// The part of an operation on which members must agree, without its name.
struct Plan {
  Kind kind;
  Reduction reduction = Reduction::kSum;
  int root = 0;  // of a broadcast; of a leave: its step, see Engine::leave()
  double prescale = 1, postscale = 1;
  int process_set = 0;
  // Not 0: the memory is a device's, and the submitter runs the operation itself, at its turn.
  int device = 0;
  // An operation of the library itself, which never matches a user's.
  bool own = false;
  std::vector<TensorPlan> tensors;

  std::string encode() const;
  // Throws CollectiveError, also if check() throws.
  static Plan decode(std::string_view bytes);
  // Throws std::invalid_argument for a plan that no rank can run: elements that cannot be reduced, negative extents, or
  // more bytes than the address space has.
  void check() const;
  // Whether the first dimensions are sent with each submission, because they may differ between members: for an
  // allgather one per tensor, for an alltoall one per tensor and member.
  bool sized() const { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }
  // The number of elements of a tensor, or of one row of it if the plan is sized. check() must have passed.
  size_t elements(size_t tensor) const;
  size_t bytes(size_t tensor) const { return elements(tensor) * wire_type_size(tensors[tensor].type); }
};

// Compare bit by bit.
bool operator==(const TensorPlan& one, const TensorPlan& other);
bool operator==(const Plan& one, const Plan& other);

// Return whether small tensors of these operations may run together.
bool can_be_fused(const Plan& plan);
bool fuse_with(const Plan& one, const Plan& other);

// Returns whether each tensor has the right number of sizes, all of them non-negative, and the rows of all members
// together have an addressable number of bytes. `sizes`: the sizes of `given_by` members; `members`: the size of the
// set, for an alltoall's splits.
bool sizes_fit(const Plan& plan, const std::vector<int64_t>& sizes, size_t given_by, size_t members);

// Returns the bytes of one member's tensors; `sizes`: its own, see Plan::sized().
size_t payload_bytes(const Plan& plan, const std::vector<int64_t>& sizes);

// Returns the difference of two ranks' plans, in one sentence that names both ranks; "" if there is none.
std::string difference(const Plan& one, int one_rank, const Plan& other, int other_rank);

}  // namespace elastic
