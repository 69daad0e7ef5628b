#include "engine/executor.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "arithmetic/adasum.h"
#include "errors.h"

namespace elastic {
namespace {

// Smaller tensors that run together are copied into one buffer; larger ones do not benefit from it.
constexpr size_t kPackedTensorBytes = 256 * 1024;
// The limit of a packed buffer, so that it stays in the cache.
constexpr size_t kPackBytes = size_t{4} << 20;
// The names of the transports in the timeline; Horovod's, where it has them.
constexpr const char* kShared = "SHARED_MEMORY";
constexpr const char* kNetworkAllreduce = "GLOO_ALLREDUCE";
constexpr const char* kNetworkAllgather = "GLOO_ALLGATHER";

std::unique_ptr<char[]> uninitialized(size_t bytes) {
  return std::unique_ptr<char[]>(new char[std::max<size_t>(bytes, 1)]);
}

// The rows of each member's part: as even as possible, the first ones with one more.
std::vector<size_t> even_rows(size_t rows, size_t members) {
  std::vector<size_t> parts(members, rows / members);
  for (size_t i = 0; i < rows % members; ++i) ++parts[i];
  return parts;
}

bool is_small(DType type) { return type == DType::kInt8 || type == DType::kUInt8; }

// How members' elements are combined: an average is a sum until the final division.
ReduceOp combination(Reduction reduction) {
  const ReduceOp op = kernel_op(reduction);
  return op == ReduceOp::kAverage ? ReduceOp::kSum : op;
}

}  // namespace

PackBuffer::~PackBuffer() {
  if (shared_ != nullptr) segment_->release(shared_);
}

char* PackBuffer::get(size_t bytes) {
  if (segment_) {
    if (shared_bytes_ < bytes) {
      if (shared_ != nullptr) segment_->release(shared_);
      shared_bytes_ = 0;
      shared_ = static_cast<char*>(segment_->allocate(bytes));
      if (shared_ != nullptr) shared_bytes_ = bytes;
    }
    if (shared_ != nullptr) return shared_;
  }
  if (private_.size() < bytes) private_.resize(bytes);
  return private_.data();
}

Executor::Executor(int rank, Seconds limit, Timeline& timeline, Interruption interruption,
                   std::unique_ptr<LocalPlane> plane, std::shared_ptr<SharedSegment> segment)
    : rank_(rank),
      limit_(limit),
      timeline_(timeline),
      interruption_(std::move(interruption)),
      plane_(std::move(plane)),
      pack_(std::move(segment)) {}

void Executor::begin_reply() { numbers_.begin_reply(); }

template <typename Work>
void Executor::timed(const char* name, Work work) {
  if (!timeline_.on()) {
    work();
    return;
  }
  const auto begin = Timeline::Clock::now();
  work();
  spans_.push_back({name, begin, Timeline::Clock::now()});
}

std::vector<Span> Executor::run(const ProcessSet& set, const std::vector<Entry>& entries,
                                const std::vector<std::shared_ptr<Operation>>& operations) {
  const Kind kind = entries[0].plan->kind;
  Operation* const first = operations[0].get();
  if (first == nullptr && kind != Kind::kAllreduce && kind != Kind::kJoin && kind != Kind::kLeave) {
    throw CollectiveError("rank 0 runs what this rank has not submitted");
  }
  switch (kind) {
    case Kind::kAllreduce:
      run_allreduces(set, entries, operations);
      break;
    case Kind::kAllgather:
      run_allgather(set, entries[0], *first);
      break;
    case Kind::kBroadcast:
      run_broadcast(set, entries[0], *first);
      break;
    case Kind::kAlltoall:
      run_alltoall(set, entries[0], *first);
      break;
    case Kind::kReducescatter:
      run_reducescatter(set, entries[0], *first);
      break;
    case Kind::kBarrier:
      run_barrier(set);
      break;
    case Kind::kJoin:
      if (first != nullptr) first->last_joined = static_cast<int>(entries[0].sizes.at(0));
      break;
    case Kind::kLeave:
      // After the second step, ranks that have left no longer need this rank.
      if (first == nullptr && entries[0].plan->root != 0) {
        throw CollectiveError("all ranks that have not joined have left the round");
      }
      break;
  }
  return std::exchange(spans_, {});
}

void Executor::run_allreduces(const ProcessSet& set, const std::vector<Entry>& entries,
                              const std::vector<std::shared_ptr<Operation>>& operations) {
  const Plan& first = *entries[0].plan;
  const Scaling scaling{first.reduction, first.prescale, first.postscale};
  std::vector<std::unique_ptr<char[]>> neutral;
  std::vector<Piece> pieces, small;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Plan& plan = *entries[i].plan;
    for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
      Piece piece{nullptr, nullptr, plan.elements(tensor), static_cast<DType>(plan.tensors[tensor].type)};
      if (operations[i]) {
        piece.in = operations[i]->memory[tensor].input;
        piece.out = operations[i]->memory[tensor].output;
      } else {
        neutral.push_back(uninitialized(plan.bytes(tensor)));
        fill_neutral(neutral.back().get(), piece.count, piece.type, kernel_op(first.reduction));
        piece.in = piece.out = neutral.back().get();
        piece.neutral = true;
      }
      if (piece.count == 0) continue;
      (first.reduction == Reduction::kAverage && is_small(piece.type) ? small : pieces).push_back(piece);
    }
  }
  if (first.reduction == Reduction::kAdasum) {
    for (const Piece& piece : pieces) reduce_adasum(set, piece, scaling);
    return;
  }
  if (!small.empty()) average_small(set, small, scaling);
  allreduce_all(set, std::move(pieces), scaling);
}

void Executor::average_small(const ProcessSet& set, const std::vector<Piece>& pieces, const Scaling& scaling) {
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<Piece> wide;
  for (const Piece& piece : pieces) {
    if (!piece.neutral && scaling.prescale != 1) {
      copy(piece.out, piece.in, piece.bytes());
      scale_all(piece.out, piece.count, piece.type, scaling.prescale);
    }
    memory.push_back(uninitialized(piece.count * sizeof(int32_t)));
    auto* const values = reinterpret_cast<int32_t*>(memory.back().get());
    const auto* const from = static_cast<const char*>(scaling.prescale != 1 ? piece.out : piece.in);
    interruption_.in_pieces(piece.count,
                            [&](size_t at, size_t count) { widen(from + at, values + at, count, piece.type); });
    wide.push_back({values, values, piece.count, DType::kInt32});
  }
  allreduce_all(set, wide, {scaling.reduction, 1, 1});
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const auto* const values = static_cast<const int32_t*>(wide[i].out);
    interruption_.in_pieces(piece.count, [&](size_t at, size_t count) {
      narrow(values + at, static_cast<char*>(piece.out) + at, count, piece.type);
    });
    if (scaling.postscale != 1) scale_all(piece.out, piece.count, piece.type, scaling.postscale);
  }
}

void Executor::allreduce_all(const ProcessSet& set, std::vector<Piece> pieces, const Scaling& scaling) {
  // In the order of the entries, which is the same on all ranks; a batch has one type.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    const bool big_a = a.bytes() >= kPackedTensorBytes, big_b = b.bytes() >= kPackedTensorBytes;
    return big_a != big_b ? big_b : a.type < b.type;
  });
  std::vector<Piece> batch;
  size_t batched = 0;  // bytes
  for (const Piece& piece : pieces) {
    const bool big = piece.bytes() >= kPackedTensorBytes;
    if (!batch.empty() && (big || batch[0].type != piece.type || batched + piece.bytes() > kPackBytes)) {
      allreduce_packed(set, batch, scaling);
      batch.clear();
      batched = 0;
    }
    if (big) {
      allreduce(set, piece, scaling);
    } else {
      batch.push_back(piece);
      batched += piece.bytes();
    }
  }
  if (!batch.empty()) allreduce_packed(set, batch, scaling);
}

void Executor::allreduce_packed(const ProcessSet& set, const std::vector<Piece>& batch, const Scaling& scaling) {
  if (batch.size() == 1) {
    allreduce(set, batch[0], scaling);
    return;
  }
  size_t count = 0, bytes = 0;
  for (const Piece& piece : batch) {
    count += piece.count;
    bytes += piece.bytes();
  }
  char* const packed = pack_.get(bytes);
  timed("MEMCPY_IN_FUSION_BUFFER", [&] {
    size_t at = 0;
    for (const Piece& piece : batch) {
      copy(packed + at, piece.in, piece.bytes());
      if (!piece.neutral && scaling.prescale != 1) scale_all(packed + at, piece.count, piece.type, scaling.prescale);
      at += piece.bytes();
    }
  });
  allreduce(set, {packed, packed, count, batch[0].type}, {scaling.reduction, 1, scaling.postscale});
  timed("MEMCPY_OUT_FUSION_BUFFER", [&] {
    size_t at = 0;
    for (const Piece& piece : batch) {
      copy(piece.out, packed + at, piece.bytes());
      at += piece.bytes();
    }
  });
}

void Executor::scale_all(void* data, size_t count, DType type, double factor) const {
  const size_t width = element_size(type);
  interruption_.in_pieces(
      count * width, [&](size_t at, size_t size) { scale(static_cast<char*>(data) + at, size / width, type, factor); });
}

void Executor::conclude(void* data, size_t count, DType type, Reduction reduction, size_t members,
                        double postscale) const {
  const bool averages = kernel_op(reduction) == ReduceOp::kAverage;
  if (!averages && postscale == 1) return;
  const size_t width = element_size(type);
  interruption_.in_pieces(count * width, [&](size_t at, size_t size) {
    char* const part = static_cast<char*>(data) + at;
    if (averages) divide(part, size / width, type, static_cast<int>(members));
    if (postscale != 1) scale(part, size / width, type, postscale);
  });
}

void Executor::allreduce(const ProcessSet& set, const Piece& piece, const Scaling& scaling) {
  const void* in = piece.in;
  if (scaling.prescale != 1 && !piece.neutral) {
    copy(piece.out, in, piece.bytes());
    scale_all(piece.out, piece.count, piece.type, scaling.prescale);
    in = piece.out;
  }
  const ReduceOp op = combination(scaling.reduction);
  const auto finish = [&](void* data, size_t count) {
    conclude(data, count, piece.type, scaling.reduction, set.ranks.size(), scaling.postscale);
  };
  if (set.ranks.size() == 1) {
    copy(piece.out, in, piece.bytes());
    finish(piece.out, piece.count);
    return;
  }
  if (set.one_machine) {
    timed(kShared, [&] { plane_->allreduce(set.party, numbers_, in, piece.out, piece.count, piece.type, op, finish); });
    return;
  }
  const auto across = [&](void* data, size_t count) {
    if (count != 0) {
      timed(kNetworkAllreduce, [&] { set.contexts->allreduce("cross", data, count, piece.type, op, limit_); });
    }
    finish(data, count);
  };
  if (set.party.size() == 1) {
    copy(piece.out, in, piece.bytes());
    across(piece.out, piece.count);
    return;
  }
  timed(kShared, [&] {
    plane_->allreduce(set.party, numbers_, in, piece.out, piece.count, piece.type, op, across, set.cross_groups);
  });
}

void Executor::allgather(const ProcessSet& set, const void* in, void* out, const std::vector<size_t>& sizes) {
  if (!set.one_machine) {
    timed(kNetworkAllgather, [&] { set.contexts->allgather("global", in, out, sizes, limit_); });
  } else if (set.ranks.size() == 1) {
    copy(out, in, sizes[0]);
  } else {
    timed(kShared, [&] { plane_->allgather(set.party, numbers_, in, out, sizes); });
  }
}

void Executor::reduce_adasum(const ProcessSet& set, const Piece& piece, const Scaling& scaling) {
  const size_t bytes = piece.bytes(), members = set.ranks.size();
  copy(piece.out, piece.in, bytes);
  if (scaling.prescale != 1) scale_all(piece.out, piece.count, piece.type, scaling.prescale);
  if (bytes > PTRDIFF_MAX / members) throw std::bad_array_new_length();
  const auto all = uninitialized(bytes * members);
  const auto mine = uninitialized(bytes);
  copy(mine.get(), piece.out, bytes);
  allgather(set, mine.get(), all.get(), std::vector<size_t>(members, bytes));
  std::vector<void*> arrays;
  for (size_t i = 0; i < members; ++i) arrays.push_back(all.get() + i * bytes);
  adasum(arrays, piece.count, piece.type, interruption_);
  copy(piece.out, all.get(), bytes);
  if (scaling.postscale != 1) scale_all(piece.out, piece.count, piece.type, scaling.postscale);
}

void Executor::run_allgather(const ProcessSet& set, const Entry& entry, Operation& operation) {
  const Plan& plan = *entry.plan;
  const size_t tensors = plan.tensors.size();
  for (size_t tensor = 0; tensor < tensors; ++tensor) {
    const size_t row = plan.bytes(tensor);
    std::vector<size_t> sizes;
    Operation::Output output;
    for (size_t member = 0; member < set.ranks.size(); ++member) {
      const int64_t rows = entry.sizes.at(member * tensors + tensor);
      output.rows += rows;
      sizes.push_back(static_cast<size_t>(rows) * row);
    }
    output.bytes = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
    output.memory = uninitialized(output.bytes);
    if (output.bytes != 0) allgather(set, operation.memory[tensor].input, output.memory.get(), sizes);
    operation.outputs.push_back(std::move(output));
  }
}

void Executor::run_broadcast(const ProcessSet& set, const Entry& entry, Operation& operation) {
  const Plan& plan = *entry.plan;
  const auto root = static_cast<int>(std::find(set.ranks.begin(), set.ranks.end(), plan.root) - set.ranks.begin());
  for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
    const size_t bytes = plan.bytes(tensor);
    if (bytes == 0) continue;
    const Memory& memory = operation.memory[tensor];
    if (!set.one_machine) {
      if (rank_ == plan.root) copy(memory.output, memory.input, bytes);
      set.contexts->broadcast("global", memory.output, bytes, root, limit_);
    } else if (set.ranks.size() == 1) {
      copy(memory.output, memory.input, bytes);
    } else {
      plane_->broadcast(set.party, numbers_, memory.input, memory.output, bytes, root);
    }
  }
}

void Executor::run_alltoall(const ProcessSet& set, const Entry& entry, Operation& operation) {
  const Plan& plan = *entry.plan;
  const size_t members = set.ranks.size(), tensors = plan.tensors.size(), me = static_cast<size_t>(set.place);
  for (size_t tensor = 0; tensor < tensors; ++tensor) {
    const size_t row = plan.bytes(tensor);
    std::vector<std::vector<size_t>> sizes(members, std::vector<size_t>(members));
    Operation::Output output;
    for (size_t from = 0; from < members; ++from) {
      for (size_t to = 0; to < members; ++to) {
        const int64_t rows = entry.sizes.at((from * tensors + tensor) * members + to);
        sizes[from][to] = static_cast<size_t>(rows) * row;
        if (to == me) {
          output.rows += rows;
          output.received.push_back(rows);
        }
      }
    }
    output.bytes = static_cast<size_t>(output.rows) * row;
    output.memory = uninitialized(output.bytes);
    const void* const in = operation.memory[tensor].input;
    if (!set.one_machine) {
      std::vector<size_t> received;
      for (size_t from = 0; from < members; ++from) received.push_back(sizes[from][me]);
      set.contexts->alltoall("global", in, sizes[me], output.memory.get(), received, limit_);
    } else if (members == 1) {
      copy(output.memory.get(), in, output.bytes);
    } else {
      plane_->alltoall(set.party, numbers_, in, output.memory.get(), sizes);
    }
    operation.outputs.push_back(std::move(output));
  }
}

void Executor::run_reducescatter(const ProcessSet& set, const Entry& entry, Operation& operation) {
  const Plan& plan = *entry.plan;
  const size_t members = set.ranks.size(), me = static_cast<size_t>(set.place);
  for (size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
    const auto type = static_cast<DType>(plan.tensors[tensor].type);
    const auto rows = static_cast<size_t>(plan.tensors[tensor].shape.at(0));
    const size_t count = plan.elements(tensor), row = rows == 0 ? 0 : count / rows;
    const size_t width = element_size(type);
    std::vector<size_t> counts;
    for (const size_t part : even_rows(rows, members)) counts.push_back(part * row);
    Operation::Output output;
    output.rows = static_cast<int64_t>(even_rows(rows, members)[me]);
    output.bytes = counts[me] * width;
    output.memory = uninitialized(output.bytes);
    if (count != 0 && plan.reduction == Reduction::kAverage && is_small(type)) {
      const size_t first = std::accumulate(counts.begin(), counts.begin() + static_cast<long>(me), size_t{0});
      const auto own = uninitialized(count * width);
      const Scaling scaling{plan.reduction, plan.prescale, plan.postscale};
      average_small(set, {{operation.memory[tensor].input, own.get(), count, type}}, scaling);
      copy(output.memory.get(), own.get() + first * width, output.bytes);
    } else if (count != 0) {
      const void* in = operation.memory[tensor].input;
      std::unique_ptr<char[]> own;
      if (plan.prescale != 1 || !set.one_machine) {
        own = uninitialized(count * width);
        copy(own.get(), in, count * width);
        if (plan.prescale != 1) scale_all(own.get(), count, type, plan.prescale);
        in = own.get();
      }
      const auto finish = [&](void* data, size_t elements) {
        conclude(data, elements, type, plan.reduction, members, plan.postscale);
      };
      if (!set.one_machine) {
        const size_t first = std::accumulate(counts.begin(), counts.begin() + static_cast<long>(me), size_t{0});
        allreduce(set, {own.get(), own.get(), count, type}, {plan.reduction, 1, plan.postscale});
        copy(output.memory.get(), own.get() + first * width, output.bytes);
      } else if (members == 1) {
        copy(output.memory.get(), in, output.bytes);
        finish(output.memory.get(), counts[0]);
      } else {
        plane_->reducescatter(set.party, numbers_, in, output.memory.get(), counts, type, combination(plan.reduction),
                              finish);
      }
    }
    operation.outputs.push_back(std::move(output));
  }
}

void Executor::run_barrier(const ProcessSet& set) {
  if (!set.one_machine) {
    set.contexts->barrier("global", limit_);
  } else if (set.ranks.size() > 1) {
    plane_->barrier(set.party, numbers_);
  }
}

}  // namespace elastic
