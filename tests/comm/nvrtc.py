"""NVIDIA's runtime compiler from a wheel: compiles without a GPU, a driver or a CUDA toolkit."""

import ctypes
from importlib import metadata

CUPYS_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy 14.2 adds to the options of a ``RawModule`` that change code, in cupy/cuda/compiler.py: the first in
``_compile_with_cache_cuda``, the second in ``_compile`` of ``_compile_using_nvrtc_no_warning``. They come last, so
``-ftz=false`` before them has no effect. Beside them it adds folders of headers, of which the kernels need none, and
``-arch=sm_NN`` or ``-arch=compute_NN``."""


class Nvrtc:
    """The compiler of one installed distribution, such as ``nvidia-cuda-nvrtc``.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """

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
        """The code for the GPU, and what the compiler has said about the source.

        Raises:
            RuntimeError: it cannot be compiled; with what the compiler has said.
        """
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
