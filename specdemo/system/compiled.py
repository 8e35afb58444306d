"""Compiles this project's C files on this machine when they are first needed, and caches the libraries.

Without a compiler torch's operations run instead.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import zlib
from collections.abc import Sequence
from ctypes import CDLL, c_void_p, cast
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from .cpu_level import level
from .folders import cache_folder
from .hardware import c_compiler, cpu_features, cpu_has, cpu_instructions, cpu_model, wants_c
from .replaced import REPLACED

log = logging.getLogger(__name__)

VECTORS = "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"  # without them some loops stay scalar
OPTIONS = ("-std=gnu11", "-O3", *VECTORS, "-Wno-psabi", "-fPIC", "-shared")
OF_ARM = {"bf16": "bf16", "dot": "dotprod"}  # what the code uses where a CPU has it: torch's names, and the compiler's
THREADS = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"  # LLVM's and Intel's OpenMP have the first, too
TIMEOUT = 600  # seconds for the compiler: for quantized weights it takes 15 on a fast CPU


def compiled(source: Path, *options: str) -> CDLL | None:
    """The functions of a C file; None without a compiler, and where C is not wanted."""
    if source.name in REPLACED or not wants_c():
        return None
    compiler = c_compiler()
    if compiler is None:
        log.warning(
            "There is no gcc or clang here for %s: torch's own operations run instead, which are slower. "
            "`pip install ziglang` brings a compiler.",
            source.name,
        )
        return None
    try:
        library = CDLL(str(_built(compiler, source, options)))
        if hasattr(library, "use_threads"):  # it includes `threads.h`
            of_torch = CDLL(torch._C.__file__)  # and what this is linked to
            library.use_threads(*(cast(getattr(of_torch, name), c_void_p) for name in THREADS))
        return library
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("%s cannot be built: torch's own operations run instead. %s", source.name, reason)
        return None


def _built(compiler: Sequence[str], source: Path, options: Sequence[str]) -> Path:
    """The compiled library, from the cache if compiler, options, source, headers and CPU are the same.

    The file's name ends in its checksum, because loading a damaged library would end the process.

    Raises:
        OSError, SubprocessError: it cannot be compiled, or the cache cannot be written.
    """
    run = partial(subprocess.run, capture_output=True, text=True, errors="replace", check=True, timeout=TIMEOUT)
    options = [*OPTIONS, *_for_cpu(), *options]
    facts = [run([*compiler, "--version"]).stdout, *compiler, *options, str(cpu_model()), str(cpu_features())]
    sources = [source, *sorted(source.parent.glob("*.h"))]
    made_of = [*(file.read_bytes() for file in sources), *map(str.encode, facts)]
    name = f"{source.stem}-{hashlib.sha256(bytes(1).join(made_of)).hexdigest()[:16]}"
    folder = cache_folder()
    for file in folder.glob(f"{name}-*.so"):
        if file.name == _named(name, file).name:
            return file
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "built.so"
        run([*compiler, *options, str(source), "-o", str(built), "-lm"])
        return built.replace(folder / _named(name, built))  # atomic, since other processes may do the same


def _named(name: str, file: Path) -> Path:
    return Path(f"{name}-{zlib.crc32(file.read_bytes()):08x}.so")


def _for_cpu() -> Sequence[str]:
    """The options for this CPU. Of ARM's CPUs the compiler need not know more than what the code uses."""
    instructions = cpu_instructions()
    header = f'-DSIMD="simd_{instructions}.h"'
    if instructions == "neon":
        found = [f"+{name}" for feature, name in OF_ARM.items() if cpu_has(feature)]
        return header, "-mcpu=generic" + "".join(found)  # ziglang knows no armv8-a
    return header, "-march=native", *level().options
