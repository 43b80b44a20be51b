// Launches of collectives that wait for other ranks, and who waits for them on this side.
//
// The stand-in's runtime does work when it is launched. A collective cannot be done before the other ranks have come,
// and its call returns at once nevertheless, as on a GPU. So this file keeps, for every stream and event, the launches
// that are not done. It is a watcher around the watcher of the clocks, and so it sees everything that orders work:
//  - Other work on such a stream, and on one that waits for it by an event, makes the calling thread wait before it is
//    done. Collectives do not: they give their data later. A host wait waits, and a query says "not yet".
//  - If the collective fails, each later launch on the stream is an error with its text.
//
// The limit: a GPU's host goes on after such a launch, and here it does not. A program whose other rank comes to the
// collective only if this host goes on (by another way than NCCL: a store, a socket, a lock) runs on a GPU and not
// here. It gets the error of a rank that has not come. Waiting in the calls of NCCL themselves, the other way to do
// it, would stop many more programs that are right.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "declarations.h"
#include "meeting.h"

namespace nccl {

// What a stream had been given before a collective: an event of the clocks, recorded when this is made.
struct Before {
  explicit Before(standin::StreamName stream);
  ~Before();
  Before(const Before&) = delete;
  Before& operator=(const Before&) = delete;

  standin::EventState state;
};

// What one communicator launches at once: a call, or all its calls of a group. Guarded by the library's lock.
struct Launch {
  enum State { kOpen, kDone, kFailed };
  State state = kOpen;
  std::string text; // what has failed
  double deadline = 0; // for those who wait
  size_t calls = 0; // that are not done
  size_t held_by = 0; // launches that it waits for
  std::vector<std::shared_ptr<Launch>> holds;
  Befores befores; // later work on its streams comes after these
  std::function<void()> give; // hands over its data
  std::function<void(const std::string&)> refuse; // what it waits for has failed
};
using Launches = std::vector<std::shared_ptr<Launch>>;

// Puts this file's watcher around that of the runtime, if it is not there.
void attach();
// The watcher inside, or null.
standin::Watcher* clocks();

// Called with the lock.
void put(standin::StreamName stream, const std::shared_ptr<Launch>& launch);
void drop(standin::StreamName stream, const std::shared_ptr<Launch>& launch); // if nothing has to come after it
Launches open_on(standin::StreamName stream);
void finish(Launch& launch, Launch::State state, const std::string& text);

// Called without the lock. Later work on the stream comes after these.
void come_after(standin::StreamName stream, const Befores& befores);
// Waits until the launches are done. Returns the text of the first that has failed.
std::string wait_for(const Launches& launches);

// While one exists, launches of the calling thread do not wait.
class Launching {
 public:
  Launching();
  ~Launching();
};

} // namespace nccl
