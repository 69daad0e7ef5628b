// Rank 0's part of the negotiation: which operations have all their members, in what order and together with which
// others they run, and what is wrong with those that do not fit together.
//
// Ranks send batches of what they submit. Names and plans are sent in full once and by number then, and a batch that
// was sent before goes as one number: a training step that is like the one before costs each rank a few bytes. Replies
// are the same bytes for all ranks and work in the same way.
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

// Pairs the ranks' submissions: a name, of a user's or the library's own, which never meet, or the number of an unnamed
// operation, in a process set; or that all have joined. Unnamed operations are counted from each of a rank's own joins
// on: those that ranks submit after their n-th join are paired with each other, whenever the others join.
std::string named_key(int process_set, std::string_view name, bool own);
std::string join_key();
std::string unnamed_key(int process_set, Kind kind, uint64_t joins, uint64_t number);
// For errors and timelines: "allreduce.noname.3" for an unnamed one. Throws CollectiveError for what is no key.
std::string key_name(std::string_view key);

// Texts that are sent in full once and by number then; and whole bodies of messages likewise. When they come to much,
// because names or shapes change all the time, both sides forget all of them and begin anew.
class Sender {
 public:
  // The number of a text that the receiver knows, or will by the next message.
  uint64_t number(const std::string& text);
  // A message with the texts that are new, and this body.
  std::string message(const std::string& body);

 private:
  std::unordered_map<std::string, uint64_t> numbers_;
  std::vector<std::string> fresh_;
  std::unordered_map<std::string, uint64_t> bodies_;
  size_t held_ = 0;      // bytes of both, about
  bool forget_ = false;  // the next message says so
};

class Receiver {
 public:
  // The body of a message, whose new texts are known from then on. Throws CollectiveError for rubbish.
  std::string open(std::string_view message);
  const std::string& text(uint64_t number) const;
  // How often all texts were forgotten: numbers mean others from then on.
  uint64_t generation() const { return generation_; }

 private:
  std::vector<std::string> texts_;
  std::vector<std::string> bodies_;
  uint64_t generation_ = 0;
};

// One entry of a reply: an operation that all members run now.
struct Entry {
  std::string key;
  std::shared_ptr<const Plan> plan;
  std::vector<int64_t> sizes;  // of all members, in their order; for a join: who joined last
  // Members that have joined, and do not take part with what they may have submitted under this key since.
  std::vector<int> absent;
};

struct Reply {
  enum class Type : uint8_t { kRun, kMismatch, kAbort };
  Type type;
  std::vector<Entry> entries;  // run together; for a mismatch they have no plans
  std::string text;            // what is wrong
};

// The other side of a Coordinator's replies.
class ReplyReader {
 public:
  std::vector<Reply> read(std::string_view message);

 private:
  Receiver receiver_;
  std::unordered_map<uint64_t, std::shared_ptr<const Plan>> plans_;
  uint64_t generation_ = 0;  // that the plans' numbers are of
};

// The other side of a Coordinator's requests: what one rank submits.
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
  // What is under way in it fails, where it was submitted.
  void remove_process_set(int number);

  // Takes what a rank has submitted. Throws CollectiveError for rubbish.
  void receive(int rank, std::string_view message, Clock::time_point now);
  // A message for all ranks; "" when nothing is ready.
  std::string flush();
  // Whether some ranks wait for others.
  bool awaits() const { return !pending_.empty(); }
  // What to tell the user about operations that have waited long. Costs nothing while none has.
  std::vector<std::string> look(Clock::time_point now);
  // Operations that some ranks had submitted by then and others have not, the oldest first, and some of them only:
  // lines of "SINCE\tRANKS\tNAME\n", with nanoseconds of the clock, and the ranks that lack as "0-2,5".
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
    uint64_t generation = 0;                           // that the templates' numbers are of
    uint64_t joins = 0;                                // that it has submitted
    std::map<std::pair<int, Kind>, uint64_t> unnamed;  // since the last of them
    bool joined = false;                               // and others have not
    bool left = false;
  };
  struct Arrival {
    std::shared_ptr<const Plan> plan;  // none: not there yet
    std::string encoded;
    std::vector<int64_t> sizes;
  };
  struct Pending {
    int process_set = 0;
    std::vector<Arrival> arrivals;  // by place in the set
    size_t arrived = 0;
    uint64_t joins = UINT64_MAX;  // before it, of who had the fewest
    Clock::time_point since;
    Clock::time_point warned;
  };

  void arrive(int rank, const std::string& key, const Template& what, std::vector<int64_t> sizes,
              Clock::time_point now);
  void join(int rank);
  // What a member has left without submitting can never run: the round breaks.
  void refuse_hopeless(const std::string& key, const Pending& pending);
  void refuse_removed(const std::string& key, const Plan& plan);
  // Whether a member will submit it no more: it has joined since those who have submitted it.
  bool is_absent(const Pending& pending, int rank) const {
    return ranks_[static_cast<size_t>(rank)].joins > pending.joins;
  }
  bool complete(const Pending& pending) const;
  std::vector<int> missing(const Pending& pending) const;
  void make_ready(const std::string& key, Pending& pending);
  // Of all members that have submitted it, in their order; none where plans are not sized.
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
