// What all files of this library share in one process: its lock, its names for processes, devices and threads, and how
// long it waits. Everything that ranks, meetings and launches keep is read and changed with the lock held. No function of
// CUDA, of the runtime or of a watcher is called with it, but for the watcher's `forget`, which asks nothing of others.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>

namespace nccl {

using Lock = std::unique_lock<std::mutex>;
std::mutex& library_lock();
// Notified with the lock held whenever a launch is done or has failed, and when a rank has joined.
std::condition_variable& changed();

double now(); // seconds
// After how long a wait for other ranks is an error: the environment variable NOGPU_NCCL_SECONDS, or 600 as in
// torch.distributed.
double patience();
// How long each launch takes the calling thread at least: NOGPU_NCCL_LAUNCH_SECONDS, or 0. A test of
// launches by several threads at the same time makes them long.
double launch_seconds();

uint64_t process_number(); // at random, never 0; a forked child has another one
uint64_t thread_number(); // unlike those of all threads of all processes
uint64_t device_number(int device); // unlike those of all devices of all processes
// What machine this is: NCCL_HOSTID, as in NCCL, or the host's name.
std::string host_name();

} // namespace nccl
