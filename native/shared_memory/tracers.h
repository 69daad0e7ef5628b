// The processes that Yama permits to read this process's memory.
//
// With kernel.yama.ptrace_scope 1, the default of Ubuntu and of some Debian versions, a process may read another's
// private memory only if it is its ancestor, or was declared by it (PR_SET_PTRACER). A process can declare one other
// process, with all descendants of that. So the ranks of a machine declare their common ancestor: the agent, torchrun,
// or mpirun.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace elastic {

// Returns kernel.yama.ptrace_scope, read from `file`; 0 without Yama.
int ptrace_scope(const std::string& file = "/proc/sys/kernel/yama/ptrace_scope");

// Returns the nearest process that is, or is an ancestor of, each of these; 0 if there is none. `parent`: returns a
// process's parent, 0 if it is not visible.
pid_t common_ancestor(const std::vector<pid_t>& processes, const std::function<pid_t(pid_t)>& parent);
pid_t parent_of(pid_t process);

// Returns whether `ancestor` may be declared: not a system's init, from which all its processes descend. In a
// container, all processes descend from its first one, which in a pod is the agent.
bool is_narrow(pid_t ancestor, const std::string& pid_namespace);

// Lets the processes read this one's memory where Yama would not: declares the common ancestor of them and this
// process, instead of any earlier one. Returns whether it has declared one.
bool admit_readers(std::vector<pid_t> processes);
// Revokes the declaration.
void dismiss_readers();

}  // namespace elastic
