// Work that waits in its stream: see "a schedule as late as possible" in runtime.h, and late.cpp.
#pragma once

#include "state.h"

namespace standin {

// What the stream has been given so far.
Place place_of(StreamName stream);
// Later work of the stream comes after what is before the place.
void come_after(Stream& stream, const Place& before);
// Does what is before the place, and nothing that it does not depend on. Throws std::runtime_error if work has failed.
void finish(const Place& before);
void finish_device(int device);
void finish_all();

} // namespace standin
