"""specdemo: race a language model against itself with speculative decoding."""

from .system.cpu_level import set_libraries

__version__ = "0.1.0"

set_libraries()  # before torch is used
