// The page of vitals, for the sanitizers: opened and closed while other threads write to it and provide its text.
#include "vitals/page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/tests.h"

namespace vitals = elastic::vitals;

namespace {

// As elastic_driver/launch/agent/vitals_page.py makes it.
std::string new_page() {
  const int descriptor = memfd_create("page", MFD_CLOEXEC);
  CHECK(descriptor >= 0 && ftruncate(descriptor, vitals::kPageBytes) == 0);
  char head[16];
  const uint32_t numbers[] = {vitals::kVersion, vitals::kPageBytes};
  std::memcpy(head, "ELVITALS", 8);
  std::memcpy(head + 8, numbers, sizeof(numbers));
  CHECK(pwrite(descriptor, head, sizeof(head), 0) == sizeof(head));
  return "/proc/self/fd/" + std::to_string(descriptor);
}

}  // namespace

void open_vitals() { CHECK(vitals::open(new_page())); }

void test_vitals() {
  vitals::close();
  std::atomic<bool> ends{false};
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&] {
      while (!ends) {
        const vitals::Waits waits;
        const vitals::Waits within;
        const vitals::Source source([] { return std::optional<std::string>("1\t0\tx\n"); });
        vitals::submitted();
        vitals::finished(1, 8, true);
        vitals::finished(99, 8, true);
        vitals::step();
        vitals::commit(3);
        vitals::enter_round(2, 1);
      }
    });
  }
  const std::string one = new_page(), other = new_page();
  for (int i = 0; i < 20; ++i) {
    CHECK(vitals::open(i % 2 == 0 ? one : other));
    CHECK(vitals::open(one));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (i % 3 != 0) vitals::close();
  }
  ends = true;
  for (std::thread& writer : writers) writer.join();
  CHECK(!vitals::open("/dev/null"));
  CHECK(!vitals::open("/none"));
  vitals::close();
  vitals::step();
}
