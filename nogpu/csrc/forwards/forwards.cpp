// A library without functions of its own. It is compiled under the names of CUDA's driver and of NVML, and needs the
// stand-in's library of the runtime, which has the functions of all three: who opens it finds them there.
