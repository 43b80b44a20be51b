"""The CUDA kernels as NVIDIA's compiler sees them, with the options that CuPy adds: subnormals are not flushed to zero.

No GPU is needed: NVRTC comes as a wheel (the extra ``cuda-checks``) and compiles for every GPU. This proves that the
kernels compile for them, and which instructions add, widen and round. It does not prove what a GPU does with these
instructions, and launches nothing: how elements are found, and what is summed, is checked on the CPU.
"""

import ctypes
import re
from functools import cache
from importlib import metadata

import pytest
from kernel_runner import SOURCE

from dataparallel.comm import kernels
from dataparallel.comm.kernels import COPY_KERNEL, SUM_KERNELS

pytestmark = pytest.mark.devices("cpu")

FIRST = 70  # torch's own kernels need no less
COMPILERS = {"cuda12": "nvidia-cuda-nvrtc-cu12", "cuda13": "nvidia-cuda-nvrtc"}
DEPRECATED = r"nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated .*"

# Of each kernel that handles floating point, all instructions on it but for those that move it.
ARITHMETIC = {
    "sum_float64": {"add.f64"},
    "sum_float32": {"add.rn.f32"},
    "sum_float16": {"cvt.f32.f16", "add.rn.f32", "cvt.rn.f16.f32"},
    "sum_bfloat16": {"add.rn.f32"},
    "sum_float16_to_float32": {"cvt.f32.f16", "add.rn.f32"},
    "sum_bfloat16_to_float32": {"add.rn.f32"},
}
ROUNDS_BFLOAT16_FROM = 80  # older GPUs have no instruction for it
MOVES = ("mov", "ld", "st", "selp")

CUPYS_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy 14.2 adds to the options of a ``RawModule`` that change code, in cupy/cuda/compiler.py: the first in
``_compile_with_cache_cuda``, the second in ``_compile`` of ``_compile_using_nvrtc_no_warning``. They come last, so
``-ftz=false`` before them has no effect. Beside them it adds folders of headers, of which the kernels need none, and
``-arch=sm_NN`` or ``-arch=compute_NN``."""


class Nvrtc:
    """The compiler of one installed distribution."""

    def __init__(self, distribution: str) -> None:
        files = metadata.distribution(distribution).files or []
        (library,) = [file.locate() for file in files if file.name.startswith("libnvrtc.so.")]
        self._library = ctypes.CDLL(str(library))

    def architectures(self) -> list[int]:
        """Compute capabilities, 70 for 7.0, that it compiles for; in ascending order."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return sorted(numbers)

    def ptx(self, source: str, options: tuple[str, ...]) -> tuple[str, str]:
        """The code for the GPU, and what the compiler has said about the source."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        try:
            given = [option.encode() for option in options]
            failed = self._library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            log = self._text("nvrtcGetProgramLog", program)
            if failed:
                raise RuntimeError(log)
            return self._text("nvrtcGetPTX", program), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, getter: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(getter, program, text)
        return text.value.decode()

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._library, function)(*arguments)
        assert result == 0, f"{function}: error {result}"


@cache
def compiler(name: str) -> Nvrtc | None:
    try:
        return Nvrtc(COMPILERS[name])
    except metadata.PackageNotFoundError:
        return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every architecture of every compiler is a test; a compiler that is missing is one, and skipped."""
    if "architecture" not in metafunc.fixturenames:
        return
    found = []
    for name, distribution in COMPILERS.items():
        nvrtc = compiler(name)
        skip = pytest.mark.skip(reason=f"needs {distribution}: pip install 'dataparallel[cuda-checks]'")
        if nvrtc is None:
            found.append(pytest.param(name, FIRST, id=name, marks=skip))
        else:
            numbers = [number for number in nvrtc.architectures() if number >= FIRST]
            found += [pytest.param(name, number, id=f"{name}-{number}") for number in numbers]
    metafunc.parametrize(("name", "architecture"), found)


@cache
def compiled(name: str, architecture: int, source: str) -> tuple[str, str]:
    nvrtc = compiler(name)
    assert nvrtc is not None
    return nvrtc.ptx(source, (*kernels.OPTIONS, *CUPYS_OPTIONS, f"-arch=compute_{architecture}"))


def instructions(ptx: str) -> dict[str, set[str]]:
    """For each kernel its instructions, without operands."""
    assert ".func" not in ptx, "a function that is called belongs to no kernel"
    kernels = re.split(r"\.entry\s+(\w+)\(", ptx)[1:]
    bodies = dict(zip(kernels[::2], kernels[1::2], strict=True))
    found = r"^\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][\w.:]*)[^:\w]"
    return {kernel: {*re.findall(found, body, re.MULTILINE)} for kernel, body in bodies.items()}


def test_all_kernels_compile_without_a_warning(name: str, architecture: int) -> None:
    ptx, log = compiled(name, architecture, SOURCE.read_text())
    assert re.sub(DEPRECATED, "", log).strip() == ""
    assert {*instructions(ptx)} == {COPY_KERNEL, *SUM_KERNELS.values()}


def test_sums_are_made_by_instructions_that_keep_subnormals(name: str, architecture: int) -> None:
    ptx, _ = compiled(name, architecture, SOURCE.read_text())
    assert ".ftz" not in ptx
    for kernel, all_of_it in instructions(ptx).items():
        expected = ARITHMETIC.get(kernel, set())
        if kernel == "sum_bfloat16" and architecture >= ROUNDS_BFLOAT16_FROM:
            expected = {*expected, "cvt.rn.bf16.f32"}
        assert {opcode for opcode in all_of_it if computes(opcode)} == expected, kernel


def computes(opcode: str) -> bool:
    operation, *types = opcode.split(".")
    return operation not in MOVES and bool({"f16", "f32", "f64", "bf16", "f16x2", "bf16x2"}.intersection(types))


def test_without_them_subnormals_would_be_flushed(name: str, architecture: int) -> None:
    """What is looked for is what the compiler writes where the source says no more than ``+``."""
    ptx, _ = compiled(name, architecture, 'extern "C" __global__ void add(float* sum, float term) { *sum += term; }')
    assert "add.ftz.f32" in instructions(ptx)["add"]
