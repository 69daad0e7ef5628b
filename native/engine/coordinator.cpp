#include "engine/coordinator.h"

#include <algorithm>
#include <cstdio>
#include <tuple>
#include <utility>

#include "errors.h"

namespace elastic {
namespace {

// Shorter bodies get no number.
constexpr size_t kShortBody = 8;
// The approximate limit of bytes of texts and bodies that a sender holds. Rank 0 holds as much for each rank, and more.
constexpr size_t kMostHeld = size_t{2} << 20;
// The cost of holding a text, in addition to its bytes.
constexpr size_t kHoldingCost = 96;
// The limits of the text about operations that lack ranks, which has to fit onto a page of vitals.
constexpr size_t kMostLacking = 8, kMostRanges = 64, kMostName = 200;

// The gathered tensors may be an optimizer's gradients.
constexpr const char* kSparseHint = " (for sparse gradients: DistributedOptimizer(..., sparse_as_dense=True))";

// How a body is sent: in full, in full with a new number, or as a known number.
enum Mode : uint64_t { kWhole, kRemember, kKnown };

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

// Returns ranks as "0-2,5"; only the first ranges if there are too many.
std::string ranges(const std::vector<int>& ranks) {
  std::string text;
  size_t parts = 0;
  for (size_t i = 0; i < ranks.size() && parts < kMostRanges; ++parts) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += (text.empty() ? "" : ",") + std::to_string(ranks[i]);
    if (end - i > 1) text += '-' + std::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

// Replaces characters that would end a line or a column, and limits the length.
std::string printable(std::string text) {
  if (text.size() > kMostName) text = text.substr(0, kMostName) + "...";
  for (char& each : text) {
    if (static_cast<unsigned char>(each) < 0x20 || each == 0x7f) each = ' ';
  }
  return text;
}

size_t total_bytes(const Plan& plan) {
  size_t bytes = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) bytes += plan.bytes(i);
  return bytes;
}

// The part of a key after its process set: whose name follows, or that it is a join or an unnamed operation.
enum Space : uint64_t { kNamed, kOwn, kJoined, kUnnamed };

}  // namespace

std::string named_key(int process_set, std::string_view name, bool own) {
  Writer writer;
  writer.number(static_cast<uint64_t>(process_set));
  writer.number(own ? kOwn : kNamed);
  writer.raw(name);
  return writer.take();
}

std::string join_key() {
  Writer writer;
  writer.number(0);
  writer.number(kJoined);
  return writer.take();
}

std::string unnamed_key(int process_set, Kind kind, uint64_t joins, uint64_t number) {
  Writer writer;
  writer.number(static_cast<uint64_t>(process_set));
  writer.number(kUnnamed + static_cast<uint64_t>(kind));
  writer.number(joins);
  writer.number(number);
  return writer.take();
}

std::string key_name(std::string_view key) {
  Reader reader(key);
  reader.number();
  const uint64_t space = reader.number();
  if (space == kNamed || space == kOwn) return std::string(reader.rest());
  if (space == kJoined) return kind_name(Kind::kJoin);
  if (space - kUnnamed >= kKinds) throw CollectiveError("cannot read a peer's message: it names no operation");
  reader.number();
  return std::string(kind_name(static_cast<Kind>(space - kUnnamed))) + ".noname." + std::to_string(reader.number());
}

uint64_t Sender::number(const std::string& text) {
  const auto [found, added] = numbers_.try_emplace(text, numbers_.size());
  if (added) {
    fresh_.push_back(text);
    held_ += text.size() + kHoldingCost;
  }
  return found->second;
}

std::string Sender::message(const std::string& body) {
  Writer writer;
  writer.number(fresh_.size() * 2 + (std::exchange(forget_, false) ? 1 : 0));
  for (const std::string& text : fresh_) writer.text(text);
  fresh_.clear();
  const auto known = bodies_.find(body);
  if (known != bodies_.end()) {
    writer.number(kKnown);
    writer.number(known->second);
  } else if (body.size() > kShortBody) {
    bodies_.emplace(body, bodies_.size());
    held_ += body.size() + kHoldingCost;
    writer.number(kRemember);
    writer.raw(body);
  } else {
    writer.number(kWhole);
    writer.raw(body);
  }
  if (held_ > kMostHeld) {
    // From the next message on: this one uses the old numbers.
    numbers_.clear();
    bodies_.clear();
    held_ = 0;
    forget_ = true;
  }
  return writer.take();
}

std::string Receiver::open(std::string_view message) {
  Reader reader(message);
  const uint64_t head = reader.number();
  if (head % 2 == 1) {
    texts_.clear();
    bodies_.clear();
    ++generation_;
  }
  for (uint64_t count = head / 2; count > 0; --count) texts_.emplace_back(reader.text());
  const uint64_t mode = reader.number();
  if (mode == kKnown) {
    const uint64_t number = reader.number();
    if (number >= bodies_.size()) throw CollectiveError("cannot read a peer's message: it repeats what was never said");
    return bodies_[number];
  }
  std::string body(reader.rest());
  if (mode == kRemember) bodies_.push_back(body);
  return body;
}

const std::string& Receiver::text(uint64_t number) const {
  if (number >= texts_.size()) throw CollectiveError("cannot read a peer's message: it names what was never said");
  return texts_[number];
}

void RequestWriter::add(const std::string& name, const Plan& plan, const std::vector<int64_t>& sizes) {
  Writer what;
  what.text(name);
  what.raw(plan.encode());
  body_.number(sender_.number(what.bytes()));
  if (!plan.sized()) return;
  body_.number(sizes.size());
  for (const int64_t size : sizes) body_.number(static_cast<uint64_t>(size));
}

std::string RequestWriter::message() { return sender_.message(std::exchange(body_, Writer()).take()); }

std::vector<Reply> ReplyReader::read(std::string_view message) {
  const std::string body = receiver_.open(message);
  if (std::exchange(generation_, receiver_.generation()) != receiver_.generation()) plans_.clear();
  Reader reader(body);
  std::vector<Reply> replies;
  while (!reader.empty()) {
    Reply reply;
    const uint64_t type = reader.number();
    if (type > static_cast<uint64_t>(Reply::Type::kAbort)) throw CollectiveError("cannot read a peer's message");
    reply.type = static_cast<Reply::Type>(type);
    if (reply.type != Reply::Type::kRun) reply.text = reader.text();
    for (uint64_t count = reader.number(); count > 0; --count) {
      Entry entry;
      const uint64_t known = reader.number();
      entry.key = known == 0 ? std::string(reader.text()) : receiver_.text(known - 1);
      if (reply.type == Reply::Type::kRun) {
        const uint64_t plan = reader.number();
        auto& shared = plans_[plan];
        if (!shared) shared = std::make_shared<const Plan>(Plan::decode(receiver_.text(plan)));
        entry.plan = shared;
        if (shared->sized() || shared->kind == Kind::kJoin) {
          for (uint64_t sizes = reader.number(); sizes > 0; --sizes) entry.sizes.push_back(reader.size());
        }
      }
      for (uint64_t absent = reader.number(); absent > 0; --absent) entry.absent.push_back(reader.small_number());
      reply.entries.push_back(std::move(entry));
    }
    if (reply.type == Reply::Type::kRun && reply.entries.empty()) {
      throw CollectiveError("cannot read a peer's message: it runs nothing");
    }
    replies.push_back(std::move(reply));
  }
  return replies;
}

Coordinator::Coordinator(int size, size_t fusion_bytes, Patience patience)
    : fusion_bytes_(fusion_bytes), patience_(patience), ranks_(static_cast<size_t>(size)) {
  std::vector<int> everyone(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) everyone[static_cast<size_t>(rank)] = rank;
  sets_[0] = std::move(everyone);
}

void Coordinator::add_process_set(int number, const std::vector<int>& ranks) {
  sets_[number] = ranks;
  removed_.erase(number);
}

void Coordinator::remove_process_set(int number) {
  sets_.erase(number);
  removed_.insert(number);
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    if (pending->second.process_set != number) {
      ++pending;
      continue;
    }
    for (const Arrival& arrival : pending->second.arrivals) {
      if (!arrival.plan) continue;
      refuse_removed(pending->first, *arrival.plan);
      break;
    }
    pending = pending_.erase(pending);
  }
}

void Coordinator::refuse_removed(const std::string& key, const Plan& plan) {
  Entry entry;
  entry.key = key;
  ready_.push_back({Reply::Type::kMismatch,
                    {std::move(entry)},
                    "cannot " + std::string(kind_name(plan.kind)) + " '" + key_name(key) +
                        "': its process set was removed before all members had submitted it"});
}

void Coordinator::receive(int number, std::string_view message, Clock::time_point now) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  const std::string body = rank.receiver.open(message);
  if (std::exchange(rank.generation, rank.receiver.generation()) != rank.receiver.generation()) rank.templates.clear();
  Reader reader(body);
  while (!reader.empty()) {
    const uint64_t which = reader.number();
    auto found = rank.templates.find(which);
    if (found == rank.templates.end()) {
      Reader text(rank.receiver.text(which));
      Template made;
      made.name = text.text();
      made.encoded = text.rest();
      made.plan = std::make_shared<const Plan>(Plan::decode(made.encoded));
      found = rank.templates.emplace(which, std::move(made)).first;
    }
    const Template& what = found->second;
    std::vector<int64_t> sizes;
    if (what.plan->sized()) {
      for (uint64_t count = reader.number(); count > 0; --count) {
        sizes.push_back(reader.size());
      }
    }
    const int set = what.plan->process_set;
    if (what.plan->kind == Kind::kJoin) {
      join(number);
      continue;
    }
    if (what.plan->kind == Kind::kLeave) {
      if (!std::exchange(rank.left, true)) {
        has_left_ = true;
        for (const auto& [key, pending] : pending_) refuse_hopeless(key, pending);
      }
      arrive(number, unnamed_key(0, Kind::kLeave, 0, static_cast<uint64_t>(what.plan->root)), what, {}, now);
      continue;
    }
    const std::string key = what.name.empty()
                                ? unnamed_key(set, what.plan->kind, rank.joins, rank.unnamed[{set, what.plan->kind}]++)
                                : named_key(set, what.name, what.plan->own);
    arrive(number, key, what, std::move(sizes), now);
  }
}

void Coordinator::arrive(int rank, const std::string& key, const Template& what, std::vector<int64_t> sizes,
                         Clock::time_point now) {
  const auto set = sets_.find(what.plan->process_set);
  if (removed_.count(what.plan->process_set) != 0) {
    refuse_removed(key, *what.plan);
    return;
  }
  if (set == sets_.end()) throw CollectiveError("a peer uses a process set that there is not");
  const std::vector<int>& members = set->second;
  const auto place = std::find(members.begin(), members.end(), rank);
  if (place == members.end()) throw CollectiveError("a peer uses a process set that it is not in");
  auto [found, added] = pending_.try_emplace(key);
  Pending& pending = found->second;
  if (added) {
    pending.process_set = what.plan->process_set;
    pending.arrivals.resize(members.size());
    pending.since = pending.warned = now;
    if (patience_.warn_s > 0) {
      next_look_ =
          std::min(next_look_,
                   now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience_.warn_s)));
    }
    if (patience_.fail_s > 0) {
      next_look_ =
          std::min(next_look_,
                   now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience_.fail_s)));
    }
  }
  Arrival& arrival = pending.arrivals[static_cast<size_t>(place - members.begin())];
  if (arrival.plan) throw CollectiveError("rank " + std::to_string(rank) + " submits twice what is under way");
  arrival = {what.plan, what.encoded, std::move(sizes)};
  ++pending.arrived;
  pending.joins = std::min(pending.joins, ranks_[static_cast<size_t>(rank)].joins);
  if (complete(pending)) {
    make_ready(key, pending);
    pending_.erase(found);
  } else if (has_left_) {
    refuse_hopeless(key, pending);
  }
}

void Coordinator::refuse_hopeless(const std::string& key, const Pending& pending) {
  std::vector<int> left;
  for (const int rank : missing(pending)) {
    if (ranks_[static_cast<size_t>(rank)].left) left.push_back(rank);
  }
  for (const Arrival& arrival : pending.arrivals) {
    if (arrival.plan && arrival.plan->kind == Kind::kLeave) return;
  }
  if (left.empty()) return;
  ready_.push_back({Reply::Type::kAbort, {}, join_ranks(left) + " left the round without '" + key_name(key) + "'"});
}

void Coordinator::join(int number) {
  Rank& joiner = ranks_[static_cast<size_t>(number)];
  if (std::exchange(joiner.joined, true)) throw CollectiveError("rank " + std::to_string(number) + " joins twice");
  // As the rank's engine does.
  ++joiner.joins;
  joiner.unnamed.clear();
  last_joined_ = number;
  const bool all = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.joined; });
  std::vector<std::string> done;
  for (auto& [key, pending] : pending_) {
    if (complete(pending)) done.push_back(key);
  }
  std::sort(done.begin(), done.end(), [&](const std::string& a, const std::string& b) {
    return std::tie(pending_[a].since, a) < std::tie(pending_[b].since, b);
  });
  for (const std::string& key : done) {
    make_ready(key, pending_[key]);
    pending_.erase(key);
  }
  if (!all) return;
  Plan plan;
  plan.kind = Kind::kJoin;
  Entry entry{join_key(), std::make_shared<const Plan>(plan), {last_joined_}, {}};
  ready_.push_back({Reply::Type::kRun, {std::move(entry)}, ""});
  for (Rank& rank : ranks_) rank.joined = false;
}

bool Coordinator::complete(const Pending& pending) const {
  const std::vector<int>& members = sets_.at(pending.process_set);
  if (pending.arrived == members.size()) return true;
  for (size_t i = 0; i < members.size(); ++i) {
    if (!pending.arrivals[i].plan && !is_absent(pending, members[i])) return false;
  }
  return pending.arrived > 0;
}

std::vector<int64_t> Coordinator::all_sizes(const Pending& pending) {
  std::vector<int64_t> sizes;
  for (const Arrival& arrival : pending.arrivals) {
    if (arrival.plan && arrival.plan->sized()) sizes.insert(sizes.end(), arrival.sizes.begin(), arrival.sizes.end());
  }
  return sizes;
}

std::string Coordinator::objection(const Pending& pending) const {
  const std::vector<int>& members = sets_.at(pending.process_set);
  size_t first = 0;
  while (!pending.arrivals[first].plan) ++first;
  const Arrival& reference = pending.arrivals[first];
  std::vector<int> joined;
  // The message compares a rank of the largest group that agrees with one that differs from it.
  std::map<std::string, std::vector<size_t>> camps;
  for (size_t i = 0; i < members.size(); ++i) {
    if (pending.arrivals[i].plan) {
      camps[pending.arrivals[i].encoded].push_back(i);
    } else {
      joined.push_back(members[i]);
    }
  }
  if (camps.size() > 1) {
    const auto most = std::max_element(camps.begin(), camps.end(), [](const auto& a, const auto& b) {
      return a.second.size() < b.second.size() || (a.second.size() == b.second.size() && a.second[0] > b.second[0]);
    });
    std::string text;
    for (const auto& [encoded, places] : camps) {
      if (encoded == most->first) continue;
      const std::string what = difference(*pending.arrivals[most->second[0]].plan, members[most->second[0]],
                                          *pending.arrivals[places[0]].plan, members[places[0]]);
      text += (text.empty() ? "" : "; ") + what;
      if (places.size() > 1) {
        std::vector<int> too;
        for (size_t i = 1; i < places.size(); ++i) too.push_back(members[places[i]]);
        text += " (as " + join_ranks(too) + (too.size() == 1 ? " has)" : " have)");
      }
    }
    return text;
  }
  const Plan& plan = *reference.plan;
  if (!joined.empty() && plan.kind != Kind::kAllreduce && plan.kind != Kind::kLeave) {
    return std::string(kind_name(plan.kind)) + " is not supported while " + join_ranks(joined) +
           (joined.size() == 1 ? " has" : " have") + " joined" + (plan.kind == Kind::kAllgather ? kSparseHint : "");
  }
  if (plan.kind == Kind::kAlltoall || plan.kind == Kind::kAllgather) {
    const size_t expected = plan.tensors.size() * (plan.kind == Kind::kAlltoall ? members.size() : 1);
    for (size_t i = 0; i < members.size(); ++i) {
      if (pending.arrivals[i].plan && pending.arrivals[i].sizes.size() != expected) {
        return "rank " + std::to_string(members[i]) + " has " + std::to_string(pending.arrivals[i].sizes.size()) +
               " splits, not " + std::to_string(expected);
      }
    }
  }
  if (!sizes_fit(plan, all_sizes(pending), members.size(), members.size())) {
    return "what the ranks have together is more than memory has addresses for";
  }
  return "";
}

void Coordinator::make_ready(const std::string& key, Pending& pending) {
  const std::string wrong = objection(pending);
  Entry entry;
  entry.key = key;
  const std::vector<int>& members = sets_.at(pending.process_set);
  for (size_t place = 0; place < members.size(); ++place) {
    const Arrival& arrival = pending.arrivals[place];
    if (arrival.plan) {
      entry.plan = arrival.plan;
    } else {
      entry.absent.push_back(members[place]);
    }
  }
  if (!wrong.empty()) {
    const std::string text =
        "cannot " + std::string(kind_name(entry.plan->kind)) + " '" + key_name(key) + "': " + wrong;
    ready_.push_back({Reply::Type::kMismatch, {std::move(entry)}, text});
    return;
  }
  entry.sizes = all_sizes(pending);
  ready_.push_back({Reply::Type::kRun, {std::move(entry)}, ""});
}

void Coordinator::write(Writer& body, const std::vector<Entry>& entries) {
  body.number(entries.size());
  for (const Entry& entry : entries) {
    Reader reader(entry.key);
    reader.number();
    if (reader.number() < kUnnamed) {
      body.number(sender_.number(entry.key) + 1);
    } else {
      body.number(0);
      body.text(entry.key);
    }
    if (entry.plan) {
      body.number(sender_.number(entry.plan->encode()));
      if (entry.plan->sized() || entry.plan->kind == Kind::kJoin) {
        body.number(entry.sizes.size());
        for (const int64_t size : entry.sizes) body.number(static_cast<uint64_t>(size));
      }
    }
    body.number(entry.absent.size());
    for (const int rank : entry.absent) body.number(static_cast<uint64_t>(rank));
  }
}

std::string Coordinator::flush() {
  if (ready_.empty()) return "";
  std::vector<Reply> replies;
  std::map<size_t, size_t> open;  // index of a reply that accepts more -> its fused bytes
  for (Reply& reply : ready_) {
    const Plan* const plan = reply.entries.empty() ? nullptr : reply.entries[0].plan.get();
    if (reply.type == Reply::Type::kRun && can_be_fused(*plan)) {
      const size_t bytes = total_bytes(*plan);
      const auto room = std::find_if(open.begin(), open.end(), [&](const auto& candidate) {
        return fuse_with(*replies[candidate.first].entries[0].plan, *plan) && candidate.second + bytes <= fusion_bytes_;
      });
      if (room != open.end()) {
        room->second += bytes;
        replies[room->first].entries.push_back(std::move(reply.entries[0]));
        continue;
      }
      open[replies.size()] = bytes;
    }
    replies.push_back(std::move(reply));
  }
  ready_.clear();
  Writer body;
  for (Reply& reply : replies) {
    body.number(static_cast<uint64_t>(reply.type));
    if (reply.type != Reply::Type::kRun) {
      body.text(reply.text);
      for (Entry& entry : reply.entries) entry.plan = nullptr;
    }
    write(body, reply.entries);
  }
  return sender_.message(body.bytes());
}

std::vector<int> Coordinator::missing(const Pending& pending) const {
  const std::vector<int>& members = sets_.at(pending.process_set);
  std::vector<int> found;
  for (size_t i = 0; i < members.size(); ++i) {
    if (!pending.arrivals[i].plan && !is_absent(pending, members[i])) found.push_back(members[i]);
  }
  return found;
}

std::string Coordinator::lacking(Clock::time_point since) const {
  using Item = std::pair<const std::string, Pending>;
  std::vector<const Item*> found;
  for (const Item& item : pending_) {
    if (item.second.since <= since) found.push_back(&item);
  }
  if (found.empty()) return "";
  const size_t told = std::min(found.size(), kMostLacking);
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(told), found.end(),
                    [](const Item* one, const Item* other) {
                      return std::tie(one->second.since, one->first) < std::tie(other->second.since, other->first);
                    });
  std::string text;
  for (size_t i = 0; i < told; ++i) {
    const Pending& pending = found[i]->second;
    const auto at = std::chrono::duration_cast<std::chrono::nanoseconds>(pending.since.time_since_epoch());
    text += std::to_string(at.count()) + '\t' + ranges(missing(pending)) + '\t';
    for (const Arrival& arrival : pending.arrivals) {
      if (!arrival.plan) continue;
      text += std::string(kind_name(arrival.plan->kind)) + ' ';
      break;
    }
    text += '\'' + printable(key_name(found[i]->first)) + "'\n";
  }
  return text;
}

std::vector<std::string> Coordinator::look(Clock::time_point now) {
  std::vector<std::string> warnings;
  if (now < next_look_) return warnings;
  const auto seconds = [](double value) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
  };
  next_look_ = Clock::time_point::max();
  // One warning for all operations that wait for the same ranks.
  std::map<std::vector<int>, std::vector<std::string>> late;
  bool failed = false;
  for (auto& [key, pending] : pending_) {
    const std::vector<int> missing = this->missing(pending);
    if (patience_.warn_s > 0 && now - pending.warned >= seconds(patience_.warn_s)) {
      pending.warned = now;
      late[missing].push_back(key_name(key));
    }
    if (patience_.fail_s > 0 && now - pending.since >= seconds(patience_.fail_s) && !failed) {
      failed = true;
      char waited[32];
      std::snprintf(waited, sizeof(waited), "%.0f", patience_.fail_s);
      ready_.push_back({Reply::Type::kAbort,
                        {},
                        join_ranks(missing) + " did not submit '" + key_name(key) + "' within " + waited +
                            " s, when the others had"});
    }
    if (patience_.warn_s > 0) next_look_ = std::min(next_look_, pending.warned + seconds(patience_.warn_s));
    if (patience_.fail_s > 0) next_look_ = std::min(next_look_, pending.since + seconds(patience_.fail_s));
  }
  for (auto& [missing, names] : late) {
    std::sort(names.begin(), names.end());
    std::string text;
    for (size_t i = 0; i < std::min<size_t>(names.size(), 5); ++i) text += (i == 0 ? "" : ", ") + names[i];
    if (names.size() > 5) text += " and " + std::to_string(names.size() - 5) + " more";
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%.0f", patience_.warn_s);
    warnings.push_back("stalled: " + join_ranks(missing) + (missing.size() == 1 ? " has" : " have") +
                       " not submitted what the others have for " + waited + " s and more: " + text);
  }
  return warnings;
}

}  // namespace elastic
