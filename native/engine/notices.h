// Lines for the user on standard error, from threads that must never wait for the reader.
#pragma once

#include <string>

namespace elastic {

class Notices {
 public:
  // Keeps a line, given without its line end, for flush(). Lines beyond a limit are dropped.
  void add(const std::string& line);
  // Writes as much as possible without blocking, and keeps the rest for the next call. Does not change the descriptor's
  // flags, since other processes may share it.
  void flush();

 private:
  std::string pending_;
};

}  // namespace elastic
