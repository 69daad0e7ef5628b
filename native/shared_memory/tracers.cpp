#include "shared_memory/tracers.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace elastic {
namespace {

// include/linux/proc_ns.h: PROC_PID_INIT_INO.
constexpr const char* kSystemsNamespace = "pid:[4026531836]";
// A longer chain of parents is an error, or changes while it is read.
constexpr size_t kMostAncestors = 1000;

std::vector<pid_t> lineage(pid_t process, const std::function<pid_t(pid_t)>& parent) {
  std::vector<pid_t> chain;
  for (pid_t at = process; at > 0 && chain.size() < kMostAncestors; at = parent(at)) chain.push_back(at);
  return chain;
}

std::string own_pid_namespace() {
  char target[64];
  const ssize_t length = readlink("/proc/self/ns/pid", target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : kSystemsNamespace;
}

}  // namespace

int ptrace_scope(const std::string& file) {
  int scope = 0;
  std::ifstream(file) >> scope;
  return scope;
}

pid_t common_ancestor(const std::vector<pid_t>& processes, const std::function<pid_t(pid_t)>& parent) {
  if (processes.empty()) return 0;
  std::vector<pid_t> common = lineage(processes[0], parent);
  for (const pid_t process : processes) {
    const std::vector<pid_t> other = lineage(process, parent);
    common.erase(std::remove_if(common.begin(), common.end(),
                                [&](pid_t one) { return std::find(other.begin(), other.end(), one) == other.end(); }),
                 common.end());
  }
  return common.empty() ? 0 : common.front();
}

pid_t parent_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  std::getline(file, line);
  // The name, in parentheses, may contain any characters.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(line.substr(name_end + 1));
  char state = 0;
  pid_t parent = 0;
  rest >> state >> parent;
  return parent;
}

bool is_narrow(pid_t ancestor, const std::string& pid_namespace) {
  return ancestor > 1 || (ancestor == 1 && pid_namespace != kSystemsNamespace);
}

bool admit_readers(std::vector<pid_t> processes) {
  if (ptrace_scope() != 1) return false;  // 0: Yama is not the reason; 2: only a capability helps; 3: nothing does
  processes.push_back(getpid());
  const pid_t ancestor = common_ancestor(processes, parent_of);
  return is_narrow(ancestor, own_pid_namespace()) &&
         prctl(PR_SET_PTRACER, static_cast<unsigned long>(ancestor), 0, 0, 0) == 0;
}

void dismiss_readers() { prctl(PR_SET_PTRACER, 0, 0, 0, 0); }

}  // namespace elastic
