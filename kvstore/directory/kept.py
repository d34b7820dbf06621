"""Connections to one Redis that are kept for calls in which each microsecond counts.

The client of redis-py takes a connection out of its pool for each call, looks whether it is still
good, counts, and puts it back: that takes as long as the round trip. Here a call takes a connection
that is idle, and finds out by the call itself whether it is still good.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionBroken
from redis.exceptions import ResponseError


def _packed(words: tuple[bytes | str | int, ...]) -> bytes:
    """A command as it travels: in one piece, where redis-py sends long words apart."""
    pieces = [b"*%d" % len(words)]
    for word in words:
        written = word if type(word) is bytes else str(word).encode()
        pieces += (b"$%d" % len(written), written)
    pieces.append(b"")
    return b"\r\n".join(pieces)


class Kept:
    """Connections of a client, one for each call under way.

    Args:
        client: of a single server; says how to connect.
    """

    def __init__(self, client: Redis) -> None:
        self._pool: Any = client.connection_pool
        self._closed = False
        self._idle: list[Any] = []

    def __repr__(self) -> str:
        return f"<Kept idle={len(self._idle)}>"

    async def do(self, *words: bytes | str | int) -> Any:
        """Ask Redis something, twice where the connection turns out to have ended meanwhile.

        Args:
            words: a command that changes nothing.

        Raises:
            RedisError: Redis answers so, or can't be reached.
            OSError: it can't be reached.
        """
        if self._idle:
            try:
                return await self._ask(self._idle.pop(), words)
            except (ConnectionBroken, OSError, RuntimeError):
                # The others have most likely ended with it.
                await self._drop()
        return await self._ask(self._pool.make_connection(), words)

    async def _ask(self, connection: Any, words: tuple[bytes | str | int, ...]) -> Any:
        try:
            await connection.send_packed_command(_packed(words), check_health=False)
            answer = await connection.read_response()
        except ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:
            # Whoever came next would be given the answer to this call.
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        if self._closed:
            await self._drop()
        return answer

    async def close(self) -> None:
        """Close the connections, those in use when their calls end."""
        self._closed = True
        await self._drop()

    async def _drop(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)
