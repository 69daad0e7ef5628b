// Whom Yama lets read this process's memory.
//
// With kernel.yama.ptrace_scope 1, Ubuntu's and Debian's default in places, a process may read another's private memory
// only if it is its ancestor, or has been declared by it (PR_SET_PTRACER). One process can be declared, and with it all
// that descend from it. So the ranks of a machine declare what they all descend from: the agent, torchrun, mpirun.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace elastic {

// kernel.yama.ptrace_scope, or what `file` says for it; 0 without Yama.
int ptrace_scope(const std::string& file = "/proc/sys/kernel/yama/ptrace_scope");

// The nearest process that all of these are, or descend from; 0 where there is none. `parent`: a process's parent, 0
// for none that can be seen.
pid_t common_ancestor(const std::vector<pid_t>& processes, const std::function<pid_t(pid_t)>& parent);
pid_t parent_of(pid_t process);

// Whether `ancestor` is one to declare. All of a system descends from its init; all of a container from its first
// process, which is the agent in a pod.
bool is_narrow(pid_t ancestor, const std::string& pid_namespace);

// Lets the processes read this one's memory where Yama would not: declares what all descend from, also this one.
// Returns whether something was declared. What this process had declared before is forgotten.
bool admit_readers(std::vector<pid_t> processes);
// Declares nobody any more.
void dismiss_readers();

}  // namespace elastic
