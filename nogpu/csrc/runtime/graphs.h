// Graphs that have been captured: their handles, and launches.
#pragma once

#include "graph.h"

namespace standin {

void* add_graph(std::shared_ptr<Graph> graph);
std::shared_ptr<Graph> graph_of(void* handle); // throws Refused
void destroy_graph(void* handle);
void* instantiate(std::shared_ptr<const Graph> graph);
void destroy_instance(void* handle);
cudaError_t launch_graph(void* handle, Stream& stream);

} // namespace standin
