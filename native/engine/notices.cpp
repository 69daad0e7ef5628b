#include "engine/notices.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace elastic {
namespace {

// The limit of bytes that are kept for a slow reader.
constexpr size_t kMostKept = 64 * 1024;

// Returns the number of bytes written, or -1 with errno.
ssize_t write_at_once(const char* text, size_t size) {
  struct stat status{};
  if (fstat(STDERR_FILENO, &status) != 0) return -1;
  if (S_ISSOCK(status.st_mode)) return send(STDERR_FILENO, text, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (!S_ISFIFO(status.st_mode) && !S_ISCHR(status.st_mode)) return write(STDERR_FILENO, text, size);
  // Opens a file description of its own: O_NONBLOCK on the present one would affect all processes that share it.
  const int own = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (own >= 0) {
    const ssize_t written = write(own, text, size);
    const int error = errno;
    close(own);
    errno = error;
    return written;
  }
  // It may belong to another user. If it polls as writable, it accepts PIPE_BUF bytes, unless other processes write,
  // too.
  pollfd polled{STDERR_FILENO, POLLOUT, 0};
  if (poll(&polled, 1, 0) <= 0 || (polled.revents & POLLOUT) == 0) {
    errno = EAGAIN;
    return -1;
  }
  return write(STDERR_FILENO, text, std::min<size_t>(size, PIPE_BUF));
}

}  // namespace

void Notices::add(const std::string& line) {
  if (pending_.size() + line.size() < kMostKept) pending_ += line + "\n";
}

void Notices::flush() {
  while (!pending_.empty()) {
    // Line by line: short lines are not mixed with other processes' output.
    const ssize_t written = write_at_once(pending_.data(), pending_.find('\n') + 1);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) return;
    if (written <= 0) {
      pending_.clear();  // there is no reader any more
      return;
    }
    pending_.erase(0, static_cast<size_t>(written));
  }
}

}  // namespace elastic
