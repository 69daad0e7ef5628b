// Stack dumps on a signal, written by a thread that holds the GIL.
//
// faulthandler's own handlers read all threads' frames at once. If another thread runs Python meanwhile, they may read
// memory that it has just freed, and crash the process. So the signals are taken over: the first signal wakes the
// thread in wait(), which writes the stacks with the GIL. A second signal, sent if there was no output, goes to the
// previous handler: in that case a call holds the GIL, and no thread's frames change. Knows nothing of Python.
#pragma once

namespace elastic::stacks {

// Takes a signal over from its handler. Signals that the process sends to itself, as abort() does, still go to that
// handler, and in a forked child all signals do. At most two signals. Returns false for a signal without a handler.
bool take_over(int signal);
// Blocks until a signal arrives. May be called only after one was taken over in this process.
void wait();
// Returns the signal that the calling thread has to answer; 0 if the previous handler has answered it.
int claim();
// Reports that the answer is written.
void answered(int signal);
// Calls the previous handler in the calling thread, which holds the GIL, and ends the process by the signal.
[[noreturn]] void die_of(int signal);

}  // namespace elastic::stacks
