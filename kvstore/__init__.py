"""The kvstore service and, for whoever uses it, the whole public API.

``import kvstore`` loads nothing else: the clients come when one of their names is first used. It
only looks whether the packages beside it are ours, because their names are common ones.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from client.aio import AsyncClient
    from client.blocking import Client
    from client.connect import aconnect, connect
    from client.layout import HeadMajorLayout
    from client.prefix import AsyncPrefixes, Prefixes
    from client.results import Change, Changes, ClientStats, GetResult, Match, PutResult
    from client.transformers import PrefixCache, layout_of
    from client.transformers_memory import KVMemory
    from client.transformers_paged import PagedPrefixCache
    from kvstore.errors import KVStoreError
    from kvstore.identity import ROOT_PARENT, ExtraKey, ExtraKind, Namespace, prefix_hashes
    from rdma.gpu_segments import GpuView

__all__ = [
    "ROOT_PARENT",
    "AsyncClient",
    "AsyncPrefixes",
    "Change",
    "Changes",
    "Client",
    "ClientStats",
    "ExtraKey",
    "ExtraKind",
    "GetResult",
    "GpuView",
    "HeadMajorLayout",
    "KVMemory",
    "KVStoreError",
    "Match",
    "Namespace",
    "PagedPrefixCache",
    "PrefixCache",
    "Prefixes",
    "PutResult",
    "aconnect",
    "connect",
    "layout_of",
    "prefix_hashes",
]

_HOMES: Final = {
    "AsyncClient": "client.aio",
    "AsyncPrefixes": "client.prefix",
    "Change": "client.results",
    "Changes": "client.results",
    "Client": "client.blocking",
    "ClientStats": "client.results",
    "ExtraKey": "kvstore.identity",
    "ExtraKind": "kvstore.identity",
    "GetResult": "client.results",
    "GpuView": "rdma.gpu_segments",
    "HeadMajorLayout": "client.layout",
    "KVMemory": "client.transformers_memory",
    "KVStoreError": "kvstore.errors",
    "Match": "client.results",
    "Namespace": "kvstore.identity",
    "PagedPrefixCache": "client.transformers_paged",
    "PrefixCache": "client.transformers",
    "Prefixes": "client.prefix",
    "PutResult": "client.results",
    "ROOT_PARENT": "kvstore.identity",
    "aconnect": "client.connect",
    "connect": "client.connect",
    "layout_of": "client.transformers",
    "prefix_hashes": "kvstore.identity",
}

_SIBLINGS: Final = ("client", "rdma", "tiers")
_ROOT: Final = Path(__file__).resolve().parent.parent


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _check_siblings() -> None:
    """Refuse to go on where another file has the name of one of our packages.

    Raises:
        ImportError: names the file that is in the way.
    """
    for name in _SIBLINGS:
        found = _location(name)
        if found is not None and found != _ROOT / name:
            raise ImportError(
                f"kvstore needs its package {name!r}, but {found} is in the way: "
                "rename that file, or start Python elsewhere",
                name=name,
                path=str(found),
            )


def _location(name: str) -> Path | None:
    """The file or folder that an import of a top-level name leads to, if any."""
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else module.__spec__
    origin = getattr(module, "__file__", None) if spec is None else spec.origin
    if origin is None:
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]).resolve() if places else None
    path = Path(origin).resolve()
    return path.parent if path.name == "__init__.py" else path


_check_siblings()
