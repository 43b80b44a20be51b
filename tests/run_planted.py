"""Runs small programs, each with its fault and without it: a process of `test_planted_faults`, for a kind of devices.

It reads a list of programs from its input, and writes what each variant raised, or nothing, to its output.
"""

import contextlib
import json
import sys
import threading
import traceback

from nogpu import cuda

KIND = sys.argv[1]
if KIND == "cuda":
    cuda.stand_in(8)

import torch  # noqa: E402

if KIND == "sim":
    from nogpu import simulate

    simulate(8)

A, B = (torch.device(KIND, index) for index in range(2))
DEVICE = torch.get_device_module(KIND)
check_clocks = torch.sim.check_clocks if KIND == "sim" else cuda.check_clocks


def variants(program):
    """The program with its fault, and without it."""
    lines = program.strip("\n").splitlines()
    return [
        "\n".join(line for line in lines if not line.rstrip().endswith(f"# {other}")) for other in ("mends", "fault")
    ]


def names():
    """What a program finds. Everything is done when it starts."""
    DEVICE.set_device(A)
    x = torch.arange(1000.0, device=A)
    found = {
        "torch": torch,
        "device": DEVICE,
        "threading": threading,
        "a": A,
        "b": B,
        "on": DEVICE.stream,
        "x": x,
        "y": torch.empty_like(x),
        "m": torch.zeros(30, 30, device=A),
        "on_b": torch.zeros(1000, device=B),
        "h": torch.zeros(1000, pin_memory=True),
        "main": DEVICE.default_stream(A),
        "side": DEVICE.Stream(A),
        "third": DEVICE.Stream(A),
        "side_b": DEVICE.Stream(B),
        "Event": DEVICE.Event,
    }
    if KIND == "cuda":
        found |= {"cuda": cuda, "rt": Raw(), "steady": steady}
    wait()
    return found


def wait():
    for device in (A, B):
        DEVICE.synchronize(device)


def steady(counts):
    """Raises if these are not those of a steady step."""
    if counts.host_waits:
        raise AssertionError(f"host waits: {', '.join(map(str, counts.host_waits))}")
    if counts.allocations or counts.frees or counts.new_streams:
        raise AssertionError(
            f"allocations: {counts.allocations}, frees: {counts.frees}, new streams: {counts.new_streams}"
        )
    if counts.new_contexts:
        raise AssertionError(f"contexts on devices {counts.new_contexts}")


class Raw:
    """CUDA's functions by ctypes: each returns its error."""

    def __getattr__(self, name):
        import ctypes

        from nogpu.cuda import libraries

        function = libraries._library()[name]
        pointer = ctypes.c_void_p

        def call(*arguments):
            return function(
                *(pointer(value) if isinstance(value, int) and value > 255 else value for value in arguments)
            )

        return call

    def check(self, error):
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def stream(self, flags):
        import ctypes

        handle = ctypes.c_void_p()
        with torch.cuda.device(A):
            self.check(self.cudaStreamCreateWithFlags(ctypes.byref(handle), flags))
        return handle.value

    def memory(self, bytes_):
        import ctypes

        address = ctypes.c_void_p()
        with torch.cuda.device(A):
            self.check(self.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(bytes_)))
        return address.value


def raised(program):
    """What it has raised, or None."""
    space = names()
    try:
        exec(compile(program, "planted.py", "exec"), space)
        check_clocks()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        return f"{type(error).__name__}: {error}"
    finally:
        if KIND == "cuda":
            Raw().cudaGetLastError()  # what a call has left that nobody looked at
        wait()
        space.clear()
        with contextlib.suppress(RuntimeError):  # what comes after the first
            check_clocks()
        wait()
    return None


def main():
    results = []
    for program in json.load(sys.stdin):
        results.append([raised(variant) for variant in variants(program)])
    json.dump(results, sys.stdout)


main()
