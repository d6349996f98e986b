"""Makes the CUDA build of torch importable where no CUDA is installed.

The package index has torch for x86-64 only as built for CUDA, and its libraries name some fifteen
CUDA libraries that they are linked to. This writes an empty library for each of those names, and
one that has all the functions they are asked for: each returns 100, `cudaErrorNoDevice`. So torch
finds no device and runs on the CPU. None of its CUDA code ever runs.

    cuda_stubs.py TORCH_LIB_DIRECTORY

It needs gcc, nm and readelf (Debian: build-essential), and x86-64.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CUDA_LIBRARY = re.compile(r"^lib(cu|nv|nccl)")
CUDA_SYMBOL = re.compile(
    r"^(__cuda|cuda|cu[A-Z]|cublas|cudnn|cufft|cusparse|cusolver|curand|cupti|cufile|cuFile"
    r"|nvrtc|nccl|pnccl|nvshmem|nvtx|nvml|nvJit|__nv)"
)
NO_DEVICE = 100
STUB = "libcudastub.so"
RETURNS_TEXT = {
    "cudaGetErrorString",
    "cudaGetErrorName",
    "cublasGetStatusString",
    "cudnnGetErrorString",
    "ncclGetErrorString",
}


def run(*command: str | Path) -> str:
    """The output of a command that must not fail."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed_libraries(libraries: list[Path]) -> set[str]:
    """The CUDA libraries that these are linked to and that do not lie beside them."""
    have = {library.name for library in libraries}
    needed = set()
    for library in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-dW", library)))
    return {name for name in needed - have if CUDA_LIBRARY.match(name)}


def missing_symbols(libraries: list[Path]) -> set[str]:
    """The functions of CUDA that these ask for and do not have themselves."""
    defined, wanted = set(), set()
    for library in libraries:
        for line in run("nm", "-D", library).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind not in "Uw":
                defined.add(name)
            elif CUDA_LIBRARY.match(version) or CUDA_SYMBOL.match(name):
                wanted.add(name)
    return wanted - defined


def stub_source(symbols: set[str]) -> str:
    """Assembly that has each of these functions."""
    lines = [".text"]
    for symbol in sorted(symbols):
        result = "leaq .Ltext(%rip), %rax" if symbol in RETURNS_TEXT else f"movl ${NO_DEVICE}, %eax"
        lines.append(f".globl {symbol}\n.type {symbol},@function\n{symbol}:\n{result}\nret")
    lines.append('.section .rodata\n.Ltext: .asciz "no CUDA here: this is a stub"')
    lines.append('.section .note.GNU-stack,"",@progbits')
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the stubs beside the libraries of torch."""
    directory = Path(sys.argv[1])
    libraries = sorted(
        library
        for library in directory.glob("*.so*")
        if library.name != STUB and not CUDA_LIBRARY.match(library.name)
    )
    source = directory / "cudastub.s"
    source.write_text(stub_source(missing_symbols(libraries)))
    link = ("gcc", "-shared", "-nostdlib")
    run(*link, "-o", directory / STUB, f"-Wl,-soname,{STUB}", source)
    for name in sorted(needed_libraries(libraries)):
        to_stub = ("-Wl,--no-as-needed", f"-L{directory}", "-lcudastub", "-Wl,-rpath,$ORIGIN")
        run(*link, "-o", directory / name, f"-Wl,-soname,{name}", *to_stub)


if __name__ == "__main__":
    main()
