from __future__ import annotations

import mmap
from ctypes import CDLL, c_int, c_size_t, c_void_p


def let_go(address: int, size: int) -> None:
    """Give back the whole pages of `size` bytes of a file that is mapped into memory, where this can be done.

    They are read again when they are next needed. The bytes must not have been written in memory.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        advise = CDLL(None).madvise
        advise.argtypes = [c_void_p, c_size_t, c_int]
        advise(begin, end - begin, mmap.MADV_DONTNEED)
