// What the stand-in for CUDA's runtime offers besides the functions of CUDA: the settings of the machine, counts, and
// what the other libraries (driver, NVML, NCCL, the operators) need of it. Exported from the library with C++ linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "watcher.h"

namespace standin {

// ---- the machine, to be set before the first call of CUDA

struct Machine {
  int devices = 8;
  std::string name = "NVIDIA Stand-In (no GPU)";
  int major = 8, minor = 0; // compute capability
  size_t bytes = size_t{80} << 30; // of each device
  int processors = 108;
  bool ecc = false;
};
void set_machine(const Machine& machine);
const Machine& machine();

enum class Link { kWorks, kMissing, kBroken }; // a copy over a broken one arrives wrong, without an error
void set_link(int from, int to, Link link);
void set_capacity(int device, size_t bytes);

// ---- the watcher

// There is one, or none. It stays until the process ends.
void watch(Watcher* watcher);
Watcher* watcher();

// ---- what others need

// Whether a stream handle (a cudaStream_t) exists, and its name. Throws std::invalid_argument if it does not.
StreamName name_of(void* stream);
// The allocation that contains the address, or null: pageable host memory. For parts, see `part_of`.
Memory* memory_of(const void* address);
// The part of an allocation from an address on; `memory` is null for pageable host memory.
Part part_of(const void* address, size_t bytes, bool writes, const char* argument);

// Announces work on a stream, as every copy does: the implicit waits of the legacy default stream, then the watcher's
// `launch`. Returns the message if something is wrong. Where CUDA itself refuses the work, as in a capture that is
// invalid, the message is CUDA's, and the error is the thread's last one, as after a kernel's launch. The caller does the
// work at once, which cannot be captured, or passes it to `in_turn`.
enum class Turn { kAtOnce, kLater };
std::string announce(StreamName stream, const char* name, const Part* parts, size_t count,
                     const CopyInfo* copy = nullptr, Turn turn = Turn::kAtOnce);
// `later` waits for what `earlier` has been given so far.
void let_wait(StreamName later, StreamName earlier);

// What the watcher has found and no caller has asked for: a message that `announce` has returned is kept until somebody
// asks CUDA for the text of the error, or calls `has_told`. Returns the messages and forgets them.
std::vector<std::string> take_untold();
void has_told(const std::string& message);

// What is wrong with a kernel on a device that touches these parts itself: memory of a device that is no enabled peer.
// Empty if nothing is. Copies and collectives need no peers; operators and kernels ask before they announce.
std::string check_access(int device, const char* name, const Part* parts, size_t count);

// A kernel of a module that this thread launches from now on is not run: it touches these parts, says the program. Null
// ends that; the parts have to live until then.
void describe_kernels(const std::vector<Part>* parts);

// Keeps a text with which the next cudaErrorUnknown (999) of this thread explains itself (cudaGetErrorString), and
// returns that error.
int fail(const std::string& text);

// A kernel that a program launches by a host address or by name runs this instead, with CUDA's array of arguments.
using HostKernel = void (*)(StreamName stream, void** arguments, const unsigned grid[3], const unsigned block[3],
                            size_t shared_bytes);
void add_kernel(const std::string& mangled_name, HostKernel kernel);

// ---- work of streams

// Does work of a stream, or keeps it for each launch of the graph if the stream captures. It names memory by addresses,
// and calls neither CUDA nor Python. `announce` has let it through.
void in_turn(StreamName stream, std::function<void()> work);

// Switched on, work that could be captured is never done, and memory keeps what it has. All else is as before.
void set_skipping(bool skips);
bool is_skipping();

// ---- captures

bool anybody_captures();
// True if the stream keeps what it is given. Work that `announce` cannot pass to `in_turn` is refused then.
bool is_capturing(StreamName stream);

// ---- counts, for tests

struct Counts {
  std::vector<std::pair<std::string, uint64_t>> calls; // by function
  std::vector<std::string> kernels; // that were launched and are not computed
  std::vector<bool> contexts; // by device
  uint64_t host_waits = 0;
};
Counts counts();
void count_call(const char* function); // of another library's function; the name is a literal
void forget_counts();

} // namespace standin
