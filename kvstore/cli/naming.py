"""From what people type (hex beginnings, model names, token ids) to namespaces and hashes."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import typer

from kvstore.control.interface import (
    MAX_HASHES,
    MIN_BEGINNING,
    BlockName,
    NamespaceReport,
)

_MAX_FILE: Final = 256 << 20
_FULL: Final = 64


class Knows(Protocol):
    """Who is asked what names stand for: a node, or a pool."""

    async def namespaces(self) -> Sequence[NamespaceReport]:
        """See ``ControlTarget.namespaces``."""
        ...

    async def find(
        self, beginning: str, namespace: bytes | None, limit: int
    ) -> Sequence[BlockName]:
        """See ``ControlTarget.find``."""
        ...


async def find_namespace(node: Knows, selector: str | None) -> NamespaceReport:
    """The one namespace that ``selector`` names, or the only one with blocks where it is None.

    Without a selector, and where none has blocks, it is the only one that is known. A full
    fingerprint that the node does not know is taken as it is, so that ``explain`` can say so.

    Raises:
        typer.BadParameter: none or several fit.
    """
    known = await node.namespaces()
    if selector is None:
        found = [one for one in known if one.blocks] or list(known)
    else:
        wanted = selector.lower()
        found = [one for one in known if one.fingerprint.hex().startswith(wanted)]
        if len(wanted) == _FULL and not found and _is_hex(wanted):
            return NamespaceReport(bytes.fromhex(wanted), {}, 0, 0, ())
        found = found or _by_model(known, wanted)
    if len(found) == 1:
        return found[0]
    raise typer.BadParameter(_unclear(selector, found or list(known), bool(found)))


def _by_model(known: Sequence[NamespaceReport], wanted: str) -> list[NamespaceReport]:
    models = [(str(one.description.get("model", "")).lower(), one) for one in known]
    same = [one for model, one in models if model == wanted]
    return same or [one for model, one in models if wanted and wanted in model]


def _unclear(selector: str | None, choices: Sequence[NamespaceReport], several: bool) -> str:
    if not choices:
        return "the node holds no namespace yet"
    listed = "".join(
        f"\n  {one.fingerprint.hex()[:16]}  {one.description.get('model', '?')}"
        f"  {one.description.get('dtype', '')}  tenant {one.description.get('tenant', 'default')}"
        for one in choices[:10]
    )
    if selector is None:
        return f"several namespaces are held; choose one with --namespace:{listed}"
    start = f"{selector!r} names {'several namespaces' if several else 'no namespace'}"
    return f"{start}; {'those' if several else 'known'} are:{listed}"


async def find_block(node: Knows, text: str, namespace: str | None) -> BlockName:
    """The block whose hash is, or uniquely begins with, ``text``.

    Raises:
        typer.BadParameter: it is no hash, or its namespace or the rest of it is not clear.
    """
    digits = _digits(text)
    fingerprint = None
    if namespace is not None:
        fingerprint = (await find_namespace(node, namespace)).fingerprint
        if len(digits) == _FULL:
            return BlockName(fingerprint, bytes.fromhex(digits))
    found = await node.find(digits, fingerprint, 3)
    if len(found) == 1:
        return found[0]
    if found and len({one.hash for one in found}) == 1:
        raise typer.BadParameter(f"{text}: several namespaces hold it; choose with --namespace")
    if found:
        raise typer.BadParameter(f"{text}: several blocks begin so; give more digits")
    if len(digits) == _FULL:
        only = await find_namespace(node, None)
        return BlockName(only.fingerprint, bytes.fromhex(digits))
    raise typer.BadParameter(
        f"{text}: no block that is held begins so; one that isn't is named by all {_FULL} digits"
    )


def _digits(text: str) -> str:
    digits = text.lower()
    if not _is_hex(digits) or not MIN_BEGINNING <= len(digits) <= _FULL:
        raise typer.BadParameter(
            f"{text!r} is no hash: {_FULL} hex digits, or at least {MIN_BEGINNING} that are unique"
        )
    return digits


def _is_hex(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]+", text) is not None


class Prefix:
    """A prefix as the command line names it: hashes, or tokens to be hashed.

    Args:
        hashes: hex hashes, root first; ``@FILE`` for a file of them.
        tokens: token ids separated by commas, ``@FILE`` or ``-``; None where hashes are given.
        lora: name of the LoRA adapter that the tokens ran through.
        salt: cache salt of the requests.
    """

    def __init__(
        self, hashes: Sequence[str], tokens: str | None, lora: str | None, salt: str | None
    ) -> None:
        if bool(hashes) == (tokens is not None):
            raise typer.BadParameter("give hashes, or --tokens, and not both")
        if tokens is None and (lora or salt):
            raise typer.BadParameter("--lora and --cache-salt go with --tokens")
        self._hashes = hashes
        self._tokens = tokens
        self._lora = lora
        self._salt = salt

    async def find(
        self, node: Knows, namespace: str | None
    ) -> tuple[NamespaceReport, list[bytes], int]:
        """The namespace, the hashes of the full blocks, and the tokens of one block (0: unknown).

        Raises:
            typer.BadParameter: something in it is not clear.
        """
        if self._tokens is not None:
            where = await find_namespace(node, namespace)
            return where, *self._hash(where, self._tokens)
        names = _words(self._hashes)
        _check_count(len(names))
        if namespace is None and not all(len(name) == _FULL for name in names):
            first = await find_block(node, names[0], None)
            where = await find_namespace(node, first.namespace.hex())
        else:
            where = await find_namespace(node, namespace)
        hashes = [
            bytes.fromhex(_digits(name))
            if len(name) == _FULL
            else (await find_block(node, name, where.fingerprint.hex())).hash
            for name in names
        ]
        return where, hashes, int(where.description.get("block_tokens", 0))

    def _hash(self, where: NamespaceReport, tokens: str) -> tuple[list[bytes], int]:
        from kvstore.identity import ExtraKey, prefix_hashes

        block_tokens = int(where.description.get("block_tokens", 0))
        if not block_tokens:
            raise typer.BadParameter("the node does not know how many tokens a block of it has")
        extras = [ExtraKey.lora(self._lora)] if self._lora else []
        extras += [ExtraKey.cache_salt(self._salt)] if self._salt else []
        hashes = prefix_hashes(parse_tokens(tokens), block_tokens, tuple(extras))
        if not hashes:
            raise typer.BadParameter(f"fewer tokens than one block has ({block_tokens})")
        _check_count(len(hashes))
        return hashes, block_tokens


def _words(arguments: Sequence[str]) -> list[str]:
    if len(arguments) == 1 and arguments[0].startswith("@"):
        return re.findall(r"[^\s,]+", _read(arguments[0][1:]))
    return list(arguments)


def _check_count(count: int) -> None:
    if not 0 < count <= MAX_HASHES:
        raise typer.BadParameter(f"{count} blocks; between 1 and {MAX_HASHES} can be asked for")


def parse_tokens(text: str) -> list[int]:
    """Token ids from ``1,2,3``, from ``@FILE``, or from standard input (``-``).

    A file holds integers separated by commas or white space, or a JSON list of them.

    Raises:
        typer.BadParameter: there is something else in it.
    """
    if text.startswith("@") or text == "-":
        text = _read(text.removeprefix("@"))
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"token ids: not a JSON list: {error}") from error
        if all(type(one) is int for one in listed):
            return list(listed)
        raise typer.BadParameter("token ids: the JSON list must hold integers only")
    try:
        return [int(word) for word in re.findall(r"[^\s,]+", text)]
    except ValueError as error:
        raise typer.BadParameter(f"token ids: {error}") from error


def _read(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read(_MAX_FILE)
        with Path(name).open(encoding="utf-8") as file:
            return file.read(_MAX_FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{name}: cannot be read: {error}") from error
