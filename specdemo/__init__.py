"""specdemo: race a language model against itself with speculative decoding."""

__version__ = "0.1.0"
