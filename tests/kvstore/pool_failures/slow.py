"""A stand-in for a network in which every answer is late."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class SlowLink:
    """Passes on what comes to a port, and the answers later.

    Args:
        port: of the server on this machine.

    Attributes:
        delay: seconds by which answers are late.
    """

    def __init__(self, port: int) -> None:
        self.delay = 0.0
        self.port = 0
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow link")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            back, to = await asyncio.open_connection("127.0.0.1", self._to)
            await asyncio.gather(self._pass(reader, to, 0.0), self._pass(back, writer, None))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float | None
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.delay if delay is None else delay)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    @contextlib.contextmanager
    def open(self) -> Iterator[SlowLink]:
        """For the time of the block."""
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.port = int(server.sockets[0].getsockname()[1])
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._end(server), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
