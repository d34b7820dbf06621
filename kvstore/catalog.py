"""The namespaces that a node has seen, kept across restarts.

The SSD tier's records carry only a namespace's fingerprint. The catalog keeps the fields behind
each fingerprint, in one small file of the state directory, so that a restarted node can name what
it holds and say in which field a namespace differs from another. A lost or damaged catalog costs
names, never blocks: a client's HELLO describes its namespace again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgpack
import structlog

from kvstore.errors import InvalidRequest
from kvstore.identity import Namespace

_log = structlog.get_logger(__name__)
_MAX_FILE_BYTES = 64 << 20
MAX_NAMESPACES = 4096
"""Namespaces remembered; the ones seen first are forgotten first."""


class Catalog:
    """Namespaces by fingerprint; :meth:`add` writes the file when it learns a new one.

    Args:
        path: the file, created on the first :meth:`add`; None keeps the catalog in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._by_fingerprint: dict[bytes, Namespace] = {}

    def open(self) -> None:
        """Read the file, if there is one; entries that do not parse are left out and logged."""
        if self._path is None or not self._path.exists():
            return
        try:
            descriptions = self._read(self._path)
        except (OSError, ValueError, msgpack.UnpackException) as error:
            _log.warning("catalog unreadable", path=str(self._path), error=str(error))
            return
        for description in descriptions:
            try:
                namespace = Namespace.parse(description)  # type: ignore[arg-type]
            except InvalidRequest as error:
                _log.warning("catalog entry unreadable", path=str(self._path), error=str(error))
                continue
            self._by_fingerprint[namespace.fingerprint] = namespace

    @staticmethod
    def _read(path: Path) -> list[object]:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes")
        descriptions = msgpack.unpackb(path.read_bytes())
        if not isinstance(descriptions, list):
            raise ValueError("not a list of namespaces")
        return descriptions

    def add(self, namespace: Namespace) -> None:
        """Remember ``namespace``, durably if it is new."""
        if namespace.fingerprint in self._by_fingerprint:
            return
        self._by_fingerprint[namespace.fingerprint] = namespace
        if len(self._by_fingerprint) > MAX_NAMESPACES:
            del self._by_fingerprint[next(iter(self._by_fingerprint))]
        if self._path is not None:
            self._write(self._path)

    def _write(self, path: Path) -> None:
        packed = msgpack.packb([known.describe() for known in self._by_fingerprint.values()])
        draft = path.with_suffix(".draft")
        try:
            draft.write_bytes(packed)
            os.replace(draft, path)
        except OSError as error:
            _log.warning("catalog not written", path=str(path), error=str(error))

    def find(self, fingerprint: bytes) -> Namespace | None:
        """The namespace with this fingerprint, or None if it is not known."""
        return self._by_fingerprint.get(fingerprint)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_fingerprint.values())

    def __len__(self) -> int:
        return len(self._by_fingerprint)
