"""Any buffer as flat bytes: bytes-like objects, numpy arrays and torch tensors, without copying."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from kvstore.errors import InvalidRequest

Buffers: TypeAlias = "Sequence[Any] | np.ndarray[Any, Any]"
"""Several buffers: a sequence of them, or an array whose rows they are."""


@runtime_checkable
class BlockSource(Protocol):
    """Blocks that are written where they are wanted, once it is known which are.

    A source for which one large piece is faster than several small ones may have an attribute
    ``write_bytes``: how much it likes to be asked for at once.
    """

    def __len__(self) -> int:
        """How many blocks there are."""

    def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
        """Write the bytes of blocks.

        It may be asked for a block more than once, and with the asyncio client by another thread.
        What it raises ends the put and is raised to whoever called that.

        Args:
            positions: which blocks, in ascending order.
            into: memory of the size of a block for each, not to be touched after the return: it
                may be the node's own.
        """


PutBlocks: TypeAlias = "Buffers | BlockSource"
"""What a put takes its blocks from."""


def flat_bytes(buffer: object) -> memoryview:
    """View a buffer as one run of bytes.

    Args:
        buffer: anything with the buffer protocol, a numpy array, or a torch tensor on the CPU, of
            any element type; its elements must lie one after the other in memory.

    Returns:
        A memoryview of unsigned bytes over the same memory; read-only where the buffer is.

    Raises:
        InvalidRequest: this is no buffer, is not contiguous, or lies on another device.
    """
    if type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1:
        if not buffer.c_contiguous:
            raise InvalidRequest("a buffer must be contiguous")
        return buffer
    if isinstance(buffer, np.ndarray):
        return _flat_array(buffer)
    if _is_tensor(buffer):
        return _flat_array(tensor_bytes(buffer))
    try:
        view = memoryview(cast("bytes", buffer))
    except TypeError as error:
        raise InvalidRequest(f"{type(buffer).__name__} is not a buffer") from error
    if not view.c_contiguous:
        raise InvalidRequest("a buffer must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def writable_bytes(buffer: object) -> memoryview:
    """Like ``flat_bytes``, for a buffer that is to be filled.

    Raises:
        InvalidRequest: as ``flat_bytes``, or the buffer is read-only.
    """
    view = flat_bytes(buffer)
    if view.readonly:
        raise InvalidRequest("the destination is read-only")
    return view


def tensor_bytes(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """View a tensor as an array of bytes of the same shape, its last axis in bytes.

    Element types that numpy doesn't know, such as bfloat16, are thus moved as they are.

    Args:
        tensor: a numpy array or a torch tensor on the CPU, its last axis contiguous.

    Raises:
        InvalidRequest: this is neither, or its memory cannot be viewed as bytes.
    """
    if isinstance(tensor, np.ndarray):
        return _byte_array(tensor)
    if not _is_tensor(tensor):
        raise InvalidRequest(f"{type(tensor).__name__} is neither a numpy array nor a torch tensor")
    if tensor.device.type != "cpu":
        raise InvalidRequest(f"a tensor on {tensor.device} is not host memory")
    torch = sys.modules["torch"]
    try:
        viewed = tensor.detach().view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise InvalidRequest(f"the tensor cannot be viewed as bytes: {error}") from error
    return cast("np.ndarray[Any, np.dtype[np.uint8]]", viewed)


def _byte_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        return array.view(np.uint8)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the array cannot be viewed as bytes: {error}") from error


def _flat_array(array: np.ndarray[Any, Any]) -> memoryview:
    if not array.flags.c_contiguous:
        raise InvalidRequest("a buffer must be contiguous")
    if array.nbytes == 0:
        return memoryview(bytearray())
    return _byte_array(array.reshape(-1)).data


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
