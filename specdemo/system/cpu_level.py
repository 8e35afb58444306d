"""Runs this computer's CPU as an older one, to test and to measure what people with such a CPU get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import BadInput

SWITCH = "SPECDEMO_CPU"  # an environment variable: one of the `LEVELS`, or nothing


@dataclass(frozen=True, slots=True)
class Level:
    """What an older CPU lacks.

    Attributes:
        hidden: how torch's names of the missing features begin.
        options: of a C compiler, for code without them.
        environment: variables for the libraries in torch, which look at the CPU themselves.
    """

    hidden: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


WHOLE = Level()
LEVELS = {
    "avx2": Level(  # most laptops
        ("avx512", "avx10", "avx_", "amx"),
        ("-march=haswell", "-mtune=native"),
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
    "avx512": Level(  # AVX-512 without products of bfloat16: Intel's Skylake to Ice Lake
        ("avx512_bf16", "avx10", "amx"), ("-mno-avx512bf16",), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    ),
}


def level() -> Level:
    """What `SPECDEMO_CPU` asks for."""
    level = os.environ.get(SWITCH, "")
    if level and level not in LEVELS:
        raise BadInput(f"{SWITCH} is {level!r}. Choose one of: {', '.join(LEVELS)}.")
    return LEVELS.get(level, WHOLE)


def set_libraries() -> None:
    """Tell the libraries in torch, which ask when they first compute something. What is set already stays."""
    for name, value in LEVELS.get(os.environ.get(SWITCH, ""), WHOLE).environment.items():
        os.environ.setdefault(name, value)
