#include "shared_memory/tracers.h"

#include <unistd.h>

#include <fstream>
#include <map>

#include "tests/tests.h"

using elastic::common_ancestor;
using elastic::is_narrow;

void test_tracers() {
  // init(1) - sshd(10) - agent(20) - workers 21, 22 and a shell(23) with worker 24, whose child is 25; elsewhere 30.
  const std::map<pid_t, pid_t> parents{{1, 0},   {10, 1},  {20, 10}, {21, 20}, {22, 20},
                                       {23, 20}, {24, 23}, {25, 24}, {30, 1}};
  const auto parent = [&](pid_t process) {
    const auto found = parents.find(process);
    return found == parents.end() ? 0 : found->second;
  };
  CHECK(common_ancestor({21, 22}, parent) == 20);
  CHECK(common_ancestor({21, 22, 24}, parent) == 20);
  CHECK(common_ancestor({24, 25}, parent) == 24);
  CHECK(common_ancestor({21, 30}, parent) == 1);
  CHECK(common_ancestor({21, 99}, parent) == 0);  // a parent that is not visible
  CHECK(common_ancestor({}, parent) == 0);
  CHECK(common_ancestor({5, 6}, [](pid_t process) { return process == 5 ? 6 : 5; }) !=
        0);  // terminates in spite of a cycle

  CHECK(is_narrow(20, "pid:[4026531836]"));
  CHECK(!is_narrow(0, "pid:[4026532000]"));
  CHECK(!is_narrow(1, "pid:[4026531836]"));
  CHECK(is_narrow(1, "pid:[4026532000]"));

  CHECK(elastic::parent_of(getpid()) == getppid());
  CHECK(elastic::parent_of(0) == 0);
  CHECK(elastic::ptrace_scope("/nowhere") == 0);
  const std::string file = "/tmp/elastic_driver_test_scope." + std::to_string(getpid());
  std::ofstream(file) << "1\n";
  CHECK(elastic::ptrace_scope(file) == 1);
  unlink(file.c_str());
}
