"""What tells one set of weights from another, wherever its files lie.

Weights are known by what is in their files, not by path or time, so that a copy is the same model
and another model at the same path is another one. Reading all of a large model takes as long as
loading it does, so of large files only samples are read; see ``fingerprint``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvstore.errors import ConfigError

logger = logging.getLogger("kvstore.client.vllm")

WHOLE_BYTES: Final = 16 << 20
"""Files up to this size are read as a whole."""
PIECES: Final = 256
"""Evenly spaced samples of a larger file."""
MAX_TENSORS: Final = 1024
"""Tensors of a larger safetensors file that are sampled, evenly chosen."""
PIECE_BYTES: Final = 4096

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
_CODE: Final = ".py"
_CONFIGS: Final = frozenset(
    {
        "config.json",
        "params.json",
        "adapter_config.json",
        "hf_quant_config.json",
        "quant_config.json",
        "quantize_config.json",
        "kv_cache_scales.json",
    }
)
_MAX_HEADER: Final = 100 << 20
_U64: Final = struct.Struct("<Q")


def fingerprint(path: Path) -> str | None:
    """The digest of a directory of weights, or of one file of weights.

    It covers the configuration, index and code files whole, and of every file of weights its name,
    its size and its content: all of it up to ``WHOLE_BYTES``; of a larger file its beginning (of a
    safetensors file the whole header), a piece in the middle of each tensor and ``PIECES`` evenly
    spaced ones, each of ``PIECE_BYTES``. Training changes nearly every element of a tensor that it
    touches, so another checkpoint is another digest. What this can't see is an edit of a few
    elements of a large tensor that leaves the file's size as it was.

    Args:
        path: files in subdirectories don't count.

    Returns:
        ``sha256:`` and hexadecimal digits; None where there are no files of weights.

    Raises:
        ConfigError: a file can't be read.
    """
    try:
        files = [path] if path.is_file() else sorted(_relevant(path), key=lambda file: file.name)
        if not any(file.suffix in _WEIGHTS for file in files):
            return None
        total = hashlib.sha256()
        for file in files:
            name = b"" if file == path else file.name.encode("utf-8", "surrogateescape")
            total.update(_U64.pack(len(name)) + name + _content(file))
    except OSError as error:
        raise ConfigError(f"the weights in {path} cannot be read: {error}") from error
    return f"sha256:{total.hexdigest()}"


def _relevant(directory: Path) -> Iterator[Path]:
    for file in directory.iterdir():
        named = file.name in _CONFIGS or file.name.endswith(".index.json")
        if (named or file.suffix in _WEIGHTS or file.suffix == _CODE) and file.is_file():
            yield file


def _content(file: Path) -> bytes:
    """Digest of a file's size and of its content, or samples of it."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        digest.update(_U64.pack(size))
        pieces: Iterable[tuple[int, int]] = [(0, size)]
        if size > WHOLE_BYTES:
            pieces = sorted({*_spaced(size), *_tensors(file, opened, size)})
        for start, length in pieces:
            opened.seek(start)
            digest.update(opened.read(length))
    return digest.digest()


def _spaced(size: int) -> Iterator[tuple[int, int]]:
    for index in range(PIECES):
        yield (size - PIECE_BYTES) * index // (PIECES - 1), PIECE_BYTES


def _tensors(file: Path, opened: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Of a safetensors file its header, and a piece in the middle of each tensor."""
    if file.suffix != ".safetensors":
        return
    opened.seek(0)
    (length,) = _U64.unpack(opened.read(_U64.size))
    start = _U64.size + length
    if length > _MAX_HEADER or start > size:
        return
    yield 0, start
    tensors = sorted(_offsets(opened.read(length)))
    step = max(-(-len(tensors) // MAX_TENSORS), 1)
    for begin, end in tensors[::step]:
        piece = min(PIECE_BYTES, end - begin)
        yield start + (begin + end - piece) // 2, piece


def _offsets(header: bytes) -> Iterator[tuple[int, int]]:
    """Where the tensors of a safetensors file lie, as far as the header can be understood."""
    try:
        described: Any = json.loads(header)
    except ValueError:
        return
    for entry in described.values() if isinstance(described, dict) else ():
        match entry:
            case {"data_offsets": [int(begin), int(end)]} if 0 <= begin < end:
                yield begin, end


class Adapters:
    """The revisions of the LoRA adapters that an engine has loaded.

    An adapter is read once, when its first request comes: that is when the engine loads it, and it
    keeps what it has loaded even where the files change later. It is read again for a request that
    has the engine load it in place.
    """

    def __init__(self) -> None:
        self._revisions: dict[tuple[int, str, str], str | None] = {}

    def revision(self, adapter: Any) -> str | None:
        """What tells the contents of an adapter from others at the same path.

        Args:
            adapter: a ``vllm.lora.request.LoRARequest``, or None.

        Returns:
            Empty without an adapter; None where it is no local directory of weights. The name of
            an adapter on the hub doesn't say which of its commits the engine has loaded, so what
            it shapes can't be named.

        Raises:
            ConfigError: its files can't be read.
        """
        if adapter is None:
            return ""
        key = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        if key not in self._revisions or getattr(adapter, "load_inplace", False):
            path = Path(adapter.lora_path).expanduser()
            self._revisions[key] = fingerprint(path) if path.is_dir() else None
            if self._revisions[key] is None:
                logger.warning(
                    "adapter %s: %s is no local directory of weights, so nothing is stored or "
                    "reused with it",
                    adapter.lora_name,
                    adapter.lora_path,
                )
        return self._revisions[key]
