#include "vitals/stacks.h"

#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>

namespace elastic::stacks {
namespace {

enum Phase : int { kIdle, kAsked, kWriting };

struct Taken {
  std::atomic<int> signal{0};
  std::atomic<int> phase{kIdle};
  struct sigaction before{};
};

std::array<Taken, 2> all;
sem_t asked;
std::atomic<pid_t> owner{0};  // the process with the thread that answers

Taken* find(int signal) {
  for (Taken& each : all) {
    if (each.signal.load() == signal) return &each;
  }
  return nullptr;
}

// Uses only async-signal-safe calls.
void handle(int signal, siginfo_t* info, void* context) {
  Taken* const taken = find(signal);
  if (taken == nullptr) return;
  if (owner.load() == getpid() && info->si_pid != getpid()) {
    // The sender may have noticed the end of the answer that is being written, so another one follows.
    if (taken->phase.exchange(kAsked) != kAsked) {
      const int error = errno;
      sem_post(&asked);
      errno = error;
      return;
    }
    int phase = kAsked;
    if (!taken->phase.compare_exchange_strong(phase, kIdle)) return;  // it is being answered right now
  }
  if ((taken->before.sa_flags & SA_SIGINFO) != 0) {
    taken->before.sa_sigaction(signal, info, context);
  } else {
    taken->before.sa_handler(signal);
  }
}

}  // namespace

bool take_over(int signal) {
  if (owner.load() != getpid()) {  // the first time, or in a child of the process that did
    if (sem_init(&asked, 0, 0) != 0) return false;
    for (Taken& each : all) each.phase.store(kIdle);
    owner.store(getpid());
  }
  Taken* taken = find(signal);
  if (taken != nullptr) return true;
  taken = find(0);
  if (taken == nullptr || sigaction(signal, nullptr, &taken->before) != 0) return false;
  if (taken->before.sa_handler == SIG_DFL || taken->before.sa_handler == SIG_IGN) return false;
  taken->signal.store(signal);
  struct sigaction ours{};
  ours.sa_sigaction = handle;
  ours.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  return sigaction(signal, &ours, nullptr) == 0;
}

void wait() {
  while (sem_wait(&asked) != 0 && errno == EINTR) {
  }
}

int claim() {
  for (Taken& each : all) {
    int phase = kAsked;
    if (each.phase.compare_exchange_strong(phase, kWriting)) return each.signal.load();
  }
  return 0;
}

void answered(int signal) {
  int phase = kWriting;
  if (Taken* const taken = find(signal)) taken->phase.compare_exchange_strong(phase, kIdle);
}

void die_of(int signal) {
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, signal);
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  raise(signal);  // sent by this process itself, so the previous handler gets it
  struct sigaction usual{};
  usual.sa_handler = SIG_DFL;
  sigaction(signal, &usual, nullptr);
  raise(signal);
  std::abort();
}

}  // namespace elastic::stacks
