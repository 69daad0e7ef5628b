// Who asks this process for its stacks by a signal is answered by a thread that holds Python's lock.
//
// faulthandler's own handlers read all threads' frames at once. Where another thread runs Python meanwhile, they read
// what it has just freed, and the process dies of it. So the signals are taken over: the first one wakes the thread
// that is in wait(), which writes with the lock. A second one, of who saw nothing come, gets the handler that was there
// before: then a call holds the lock, and no thread's frames change. Knows nothing of Python.
#pragma once

namespace elastic::stacks {

// Takes the signal over from the handler that it has. What a process sends to itself, as abort() does, goes to that
// handler still; in a forked child, all. Two signals at most. Returns whether it has it: not one without a handler.
bool take_over(int signal);
// Blocks until a signal has come. Not before one was taken over in this process.
void wait();
// The signal that the calling thread is to answer; 0 for none, since the handler before has answered.
int claim();
// The answer is written.
void answered(int signal);
// Has the handler before write, in the calling thread, which holds the lock; and ends the process by the signal.
[[noreturn]] void die_of(int signal);

}  // namespace elastic::stacks
