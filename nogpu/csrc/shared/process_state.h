// State that all threads of a process share, and its mutex.
#pragma once

#include <pthread.h>

namespace simulated {

// Returns the only T of the process. It is never destroyed, because threads of the autograd engine free memory until
// the process ends.
//
// A forked child inherits the mutex as it is, but of all threads only the one that forks. So that thread holds the
// mutex during the fork, and both processes unlock it.
template <class T>
T& process_state() {
  static T* state = [] {
    pthread_atfork([] { process_state<T>().mutex.lock(); }, [] { process_state<T>().mutex.unlock(); },
                   [] { process_state<T>().mutex.unlock(); });
    return new T();
  }();
  return *state;
}

} // namespace simulated
