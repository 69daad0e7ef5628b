#include "engine/meeting.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "errors.h"
#include "net/wire.h"
#include "shared_memory/tracers.h"

namespace elastic {
namespace {

void write_name(Writer& writer, const SegmentName& name) {
  writer.number(static_cast<uint64_t>(name.pid));
  writer.number(static_cast<uint64_t>(name.descriptor));
  writer.number(name.nonce);
  writer.number(name.words_address);
}

SegmentName read_name(Reader& reader, const std::string& machine) {
  SegmentName name;
  name.machine = machine;
  name.pid = static_cast<pid_t>(reader.number());
  name.descriptor = reader.small_number();
  name.nonce = reader.number();
  name.words_address = reader.number();
  return name;
}

// Whether memory is shared, and how: a rank's view, or the result of all views.
struct Verdict {
  bool mapped = true;
  bool direct = true;
  bool again = false;  // whether to check again
  std::string unshared;

  std::string encode() const {
    Writer writer;
    writer.number(mapped);
    writer.number(direct);
    writer.number(again);
    writer.text(unshared);
    return writer.take();
  }
  static Verdict decode(std::string_view bytes) {
    Reader reader(bytes);
    Verdict read;
    read.mapped = reader.number() != 0;
    read.direct = reader.number() != 0;
    read.again = reader.number() != 0;
    read.unshared = reader.text();
    return read;
  }
};

// On rank 0: the answers to each rank about its machine, from the data that all ranks have sent.
class Directory {
 public:
  explicit Directory(const std::map<int, std::string>& words) {
    std::map<std::string, size_t> numbers;
    std::vector<std::pair<size_t, size_t>> runs;  // number of a machine, and of consecutive ranks on it
    for (const auto& [rank, bytes] : words) {
      Reader reader(bytes);
      const std::string name(reader.text());
      const std::string key = name.empty() ? "rank " + std::to_string(rank) : name;
      const size_t number = numbers.emplace(key, numbers.size()).first->second;
      if (number == machines_.size()) machines_.emplace_back();
      if (runs.empty() || runs.back().first != number) runs.emplace_back(number, 0);
      ++runs.back().second;
      machine_of_.push_back(number);
      if (name.empty()) continue;
      Machine& machine = machines_[number];
      machine.segments.number(static_cast<uint64_t>(rank));
      write_name(machine.segments, read_name(reader, name));
      ++machine.ranks;
    }
    runs_.number(runs.size());
    for (const auto& [number, count] : runs) {
      runs_.number(number);
      runs_.number(count);
    }
  }

  std::string answer(int rank) const {
    const Machine& machine = machines_[machine_of_[static_cast<size_t>(rank)]];
    Writer writer;
    writer.raw(runs_.bytes());
    writer.number(machine.ranks);
    writer.raw(machine.segments.bytes());
    return writer.take();
  }

 private:
  struct Machine {
    size_t ranks = 0;  // with a segment
    Writer segments;
  };
  std::vector<Machine> machines_;
  std::vector<size_t> machine_of_;  // by rank
  Writer runs_;
};

}  // namespace

SharedMemory shared_memory(const std::string& machine, bool direct_reads) {
  SharedMemory own;
  own.direct_reads = direct_reads;
  try {
    const std::string system = this_machine();
    if (system.empty()) return own;
    own.segment = std::make_shared<SharedSegment>();
    own.machine = system + " " + machine;
  } catch (const CollectiveError& error) {
    own.missing = error.what();
  }
  return own;
}

Meeting::Meeting(ControlLink& link, Clock::time_point deadline, Check check)
    : link_(link), rank_(link.rank()), size_(link.size()), deadline_(deadline), check_(std::move(check)) {}

std::string Meeting::consult(std::string words,
                             const std::function<Answers(const std::map<int, std::string>&)>& decide) {
  if (rank_ != 0) {
    link_.send(0, words, check_);
    return link_.receive_all(deadline_, check_)[0];
  }
  std::map<int, std::string> all = link_.receive_all(deadline_, check_);
  all[0] = std::move(words);
  const Answers answers = decide(all);
  for (int rank = 1; rank < size_; ++rank) link_.send(rank, answers(rank), check_);
  return answers(0);
}

Acquaintance Meeting::introduce(const SharedMemory& own) {
  Acquaintance known;
  const std::map<int, SegmentName> names = find_neighbors(own, known);
  agree_on_memory(own, names, known);
  return known;
}

// Rank 0 gets each rank's machine and segment. It sends each rank the ranks by machine, as runs over the ranks, and the
// segments of its neighbors. At this point, the machines are as if all ranks could share memory.
std::map<int, SegmentName> Meeting::find_neighbors(const SharedMemory& own, Acquaintance& known) {
  Writer words;
  words.text(own.machine);
  if (own.segment) write_name(words, own.segment->name());
  const std::string answer = consult(words.take(), [](const std::map<int, std::string>& all) {
    return [directory = Directory(all)](int rank) { return directory.answer(rank); };
  });
  Reader reader(answer);
  std::map<size_t, std::vector<int>> machines;
  int next = 0;
  for (uint64_t runs = reader.number(); runs > 0; --runs) {
    const uint64_t number = reader.number(), count = reader.number();
    if (count > static_cast<uint64_t>(size_ - next)) throw CollectiveError("rank 0 lists more ranks than the job has");
    for (uint64_t i = 0; i < count; ++i) machines[number].push_back(next++);
  }
  if (next != size_) throw CollectiveError("rank 0 does not list all ranks");
  for (auto& [number, ranks] : machines) known.machines.push_back(std::move(ranks));
  std::sort(known.machines.begin(), known.machines.end());
  std::map<int, SegmentName> names;
  for (uint64_t left = reader.number(); left > 0; --left) {
    const int rank = reader.small_number();
    const SegmentName name = read_name(reader, own.machine);
    if (rank != rank_) names[rank] = name;
  }
  return names;
}

// Either all ranks share memory, or none: a rank that did it alone would wait for ever.
void Meeting::agree_on_memory(const SharedMemory& own, const std::map<int, SegmentName>& names, Acquaintance& known) {
  Verdict mine;
  mine.unshared = own.missing;
  std::vector<pid_t> processes;
  try {
    for (const auto& [rank, name] : names) {
      known.neighbors.push_back(std::make_unique<PeerSegment>(rank, name));
      processes.push_back(name.pid);
    }
  } catch (const CollectiveError& error) {
    mine.mapped = false;
    mine.unshared = error.what();
  }
  const auto reads_all = [&] {
    return own.direct_reads && std::all_of(known.neighbors.begin(), known.neighbors.end(),
                                           [](const auto& peer) { return peer->can_read_private(); });
  };
  const auto agree = [&] {
    return Verdict::decode(consult(mine.encode(), [](const std::map<int, std::string>& all) {
      Verdict common;
      for (const auto& [rank, bytes] : all) {
        const Verdict view = Verdict::decode(bytes);
        common.mapped = common.mapped && view.mapped;
        common.direct = common.direct && view.direct;
        common.again = common.again || view.again;
        if (common.unshared.empty()) common.unshared = view.unshared;
      }
      return [bytes = common.encode()](int) { return bytes; };
    }));
  };
  // A rank whose read fails may only have been earlier than its neighbor's permission: when all ranks have answered,
  // all have given their permission.
  const bool admitted = mine.mapped && own.direct_reads && admit_readers(processes);
  mine.direct = reads_all();
  mine.again = admitted && !mine.direct;
  Verdict verdict = agree();
  if (verdict.mapped && verdict.again) {
    mine.direct = reads_all();
    mine.again = false;
    verdict = agree();
  }
  if (admitted && !verdict.direct) dismiss_readers();
  known.unshared = verdict.unshared;
  known.direct_reads = verdict.direct;
  if (verdict.mapped) return;
  known.neighbors.clear();
  known.machines.clear();
  for (int rank = 0; rank < size_; ++rank) known.machines.push_back({rank});
}

std::vector<std::string> Meeting::gather(const std::string& given, size_t own) {
  const std::string answer = consult(given, [own](const std::map<int, std::string>& all) {
    // The common part is usually the same for all ranks of a machine, so it is sent once.
    std::map<std::string_view, size_t> numbers;
    Writer table, rows;
    for (const auto& [rank, bytes] : all) {
      const size_t shared = bytes.size() - std::min(own, bytes.size());
      const std::string_view common = std::string_view(bytes).substr(0, shared);
      const auto [found, is_new] = numbers.emplace(common, numbers.size());
      if (is_new) table.text(common);
      rows.number(found->second);
      rows.text(std::string_view(bytes).substr(shared));
    }
    Writer answers;
    answers.number(numbers.size());
    answers.raw(table.bytes());
    answers.raw(rows.bytes());
    return [bytes = answers.take()](int) { return bytes; };
  });
  Reader reader(answer);
  std::vector<std::string_view> table;
  for (uint64_t left = reader.number(); left > 0; --left) table.push_back(reader.text());
  std::vector<std::string> all;
  for (int rank = 0; rank < size_; ++rank) {
    const uint64_t number = reader.number();
    if (number >= table.size()) throw CollectiveError("cannot read rank 0's data about the other ranks");
    all.push_back(std::string(table[number]).append(reader.text()));
  }
  return all;
}

}  // namespace elastic
