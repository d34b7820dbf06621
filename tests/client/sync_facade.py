"""The asyncio client behind blocking calls, so that one set of tests covers both clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import kvstore


class AsyncFacade:
    """An ``AsyncClient`` on a loop in a thread of its own."""

    def __init__(self, url: str, namespace: kvstore.Namespace, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="facade")
        self._thread.start()
        try:
            self.inner = self.run(kvstore.aconnect(url, namespace, **options))
        except BaseException:
            self._stop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def match(self, *args: Any, **options: Any) -> Any:
        return self.run(self.inner.match(*args, **options))

    def exists(self, *args: Any, **options: Any) -> Any:
        return self.run(self.inner.exists(*args, **options))

    def get(self, *args: Any, **options: Any) -> Any:
        return self.run(self.inner.get(*args, **options))

    def put(self, *args: Any, **options: Any) -> Any:
        return self.run(self.inner.put(*args, **options))

    def follow(self, *args: Any, **options: Any) -> Any:
        return self.run(self.inner.follow(*args, **options))

    @contextmanager
    def view(self, *args: Any, **options: Any) -> Iterator[Any]:
        context = self.inner.view(*args, **options)
        views = self.run(context.__aenter__())
        try:
            yield views
        finally:
            self.run(context.__aexit__(None, None, None))

    def stats(self) -> Any:
        return self.inner.stats()

    def close(self) -> None:
        if not self._loop.is_closed():
            self.run(self.inner.close())
            self._stop()

    def _stop(self) -> None:
        async def end() -> None:
            await self._loop.shutdown_default_executor()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> AsyncFacade:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


CONNECT: dict[str, Any] = {"blocking": kvstore.connect, "asyncio": AsyncFacade}
"""How to make each client, as ``kvstore.connect`` takes it."""
