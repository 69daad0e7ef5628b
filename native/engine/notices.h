// Lines for the user on standard error, from threads that must never wait for whoever reads them.
#pragma once

#include <string>

namespace elastic {

class Notices {
 public:
  // Keeps a line for flush(); without its end. Lines beyond what is worth keeping are dropped.
  void add(const std::string& line);
  // Writes what the reader accepts at once, and keeps the rest for the next time. Never blocks, and leaves the
  // descriptor, which other processes may share, as it is.
  void flush();

 private:
  std::string pending_;
};

}  // namespace elastic
