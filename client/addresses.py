"""Where buffers lie in memory, many at a time.

A load of a long prompt asks for the addresses of thousands of blocks before the first is copied. By
numpy that takes twice as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

Addresses: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE: Final = 0
_take = ctypes.pythonapi.PyObject_GetBuffer
_take.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.c_void_p,)
_release.restype = None


def addresses_of(buffers: Sequence[memoryview]) -> Addresses:
    """The address of the first byte of each buffer.

    Raises:
        BufferError: a buffer is not contiguous.
        ValueError: a buffer has been released.
    """
    found = np.empty(len(buffers), np.int64)
    shown = _Buffer()
    where = ctypes.addressof(shown)
    for number, buffer in enumerate(buffers):
        _take(buffer, where, _SIMPLE)
        found[number] = shown.buf or 0
        _release(where)
    return found
