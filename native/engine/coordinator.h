// Rank 0's part of the negotiation: it decides which operations all members have submitted, in which order and
// combinations they run, and what is wrong with operations that do not match.
//
// Ranks send their submissions in batches. Names and plans are sent in full once, and later as numbers, and a repeated
// batch is sent as one number: so a training step like the previous one costs each rank a few bytes. Replies are the
// same bytes for all ranks, and are encoded in the same way.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/plan.h"
#include "net/wire.h"

namespace elastic {

// Keys, which match the ranks' submissions: a name (of a user or of the library itself, which never match each other)
// or the number of an unnamed operation, in a process set; or a join. Unnamed operations are counted from a rank's last
// join on: those that ranks submit after their n-th join are matched with each other, whenever the others join.
std::string named_key(int process_set, std::string_view name, bool own);
std::string join_key();
std::string unnamed_key(int process_set, Kind kind, uint64_t joins, uint64_t number);
// Returns the name for errors and timelines: "allreduce.noname.3" for an unnamed one. Throws CollectiveError for an
// invalid key.
std::string key_name(std::string_view key);

// Sends texts, and whole bodies of messages, in full once, and later as numbers. If they become too many, because names
// or shapes keep changing, both sides forget all of them and begin again.
class Sender {
 public:
  // Returns the number of a text that the receiver knows, or will know by the next message.
  uint64_t number(const std::string& text);
  // Returns a message with the new texts and this body.
  std::string message(const std::string& body);

 private:
  std::unordered_map<std::string, uint64_t> numbers_;
  std::vector<std::string> fresh_;
  std::unordered_map<std::string, uint64_t> bodies_;
  size_t held_ = 0;      // bytes of both, approximately
  bool forget_ = false;  // the next message says so
};

class Receiver {
 public:
  // Returns the body of a message, and stores its new texts. Throws CollectiveError for an invalid message.
  std::string open(std::string_view message);
  const std::string& text(uint64_t number) const;
  // How often all texts were forgotten: each time, the numbers get new meanings.
  uint64_t generation() const { return generation_; }

 private:
  std::vector<std::string> texts_;
  std::vector<std::string> bodies_;
  uint64_t generation_ = 0;
};

// An entry of a reply: an operation that all members run now.
struct Entry {
  std::string key;
  std::shared_ptr<const Plan> plan;
  std::vector<int64_t> sizes;  // of all members, in their order; for a join: the rank that joined last
  // Members that have joined, and do not take part, although they may have submitted an operation with this key since.
  std::vector<int> absent;
};

struct Reply {
  enum class Type : uint8_t { kRun, kMismatch, kAbort };
  Type type;
  std::vector<Entry> entries;  // run together; without plans for a mismatch
  std::string text;            // the error
};

// Reads a Coordinator's replies.
class ReplyReader {
 public:
  std::vector<Reply> read(std::string_view message);

 private:
  Receiver receiver_;
  std::unordered_map<uint64_t, std::shared_ptr<const Plan>> plans_;
  uint64_t generation_ = 0;  // of the plans' numbers
};

// Writes a rank's submissions for a Coordinator.
class RequestWriter {
 public:
  // `name` is "" for an unnamed operation.
  void add(const std::string& name, const Plan& plan, const std::vector<int64_t>& sizes);
  std::string message();

 private:
  Sender sender_;
  Writer body_;
};

struct Patience {
  double warn_s = 60;  // 0: never
  double fail_s = 0;   // 0: never
};

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;

  Coordinator(int size, size_t fusion_bytes, Patience patience);

  void add_process_set(int number, const std::vector<int>& ranks);
  // Operations in flight in it fail on the ranks that have submitted them.
  void remove_process_set(int number);

  // Takes a rank's submissions. Throws CollectiveError for an invalid message.
  void receive(int rank, std::string_view message, Clock::time_point now);
  // Returns a message for all ranks; "" if nothing is ready.
  std::string flush();
  // Whether some ranks wait for others.
  bool awaits() const { return !pending_.empty(); }
  // Returns warnings for the user about operations that have waited long. Costs nothing while there are none.
  std::vector<std::string> look(Clock::time_point now);
  // Returns the operations that some ranks had submitted by then and others have not, the oldest first, up to a limit:
  // lines of "SINCE\tRANKS\tNAME\n", with nanoseconds of the clock, and the missing ranks as "0-2,5".
  std::string lacking(Clock::time_point since) const;

 private:
  struct Template {
    std::string name;
    std::shared_ptr<const Plan> plan;
    std::string encoded;
  };
  struct Rank {
    Receiver receiver;
    std::unordered_map<uint64_t, Template> templates;
    uint64_t generation = 0;                           // of the templates' numbers
    uint64_t joins = 0;                                // submitted so far
    std::map<std::pair<int, Kind>, uint64_t> unnamed;  // counts since the last join
    bool joined = false;                               // it has joined, and others have not
    bool left = false;
  };
  struct Arrival {
    std::shared_ptr<const Plan> plan;  // null before its arrival
    std::string encoded;
    std::vector<int64_t> sizes;
  };
  struct Pending {
    int process_set = 0;
    std::vector<Arrival> arrivals;  // by place in the set
    size_t arrived = 0;
    uint64_t joins = UINT64_MAX;  // the submitters' smallest number of earlier joins
    Clock::time_point since;
    Clock::time_point warned;
  };

  void arrive(int rank, const std::string& key, const Template& what, std::vector<int64_t> sizes,
              Clock::time_point now);
  void join(int rank);
  // Breaks the round if a member has left without submitting the operation, which can never run then.
  void refuse_hopeless(const std::string& key, const Pending& pending);
  void refuse_removed(const std::string& key, const Plan& plan);
  // Whether a member will not submit it any more, because it has joined more often than a submitter.
  bool is_absent(const Pending& pending, int rank) const {
    return ranks_[static_cast<size_t>(rank)].joins > pending.joins;
  }
  bool complete(const Pending& pending) const;
  std::vector<int> missing(const Pending& pending) const;
  void make_ready(const std::string& key, Pending& pending);
  // The sizes of all members that have submitted it, in their order; empty if plans are not sized.
  static std::vector<int64_t> all_sizes(const Pending& pending);
  std::string objection(const Pending& pending) const;
  void write(Writer& body, const std::vector<Entry>& entries);

  const size_t fusion_bytes_;
  const Patience patience_;
  std::map<int, std::vector<int>> sets_;
  std::set<int> removed_;
  std::vector<Rank> ranks_;
  int last_joined_ = -1;
  bool has_left_ = false;  // whether any rank has
  std::unordered_map<std::string, Pending> pending_;
  std::vector<Reply> ready_;
  Sender sender_;
  Clock::time_point next_look_ = Clock::time_point::max();
};

}  // namespace elastic
