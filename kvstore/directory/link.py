"""Talking to Redis: one server, one behind Sentinels, or a cluster.

Every call but ``ask`` is bounded by a number of seconds, and everything that goes wrong ends as one
of our errors. A call that is given up takes its connection with it, since an answer may still come
there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from kvstore.directory.address import PASSWORD_VARIABLE, Access, Address
from kvstore.directory.kept import Kept
from kvstore.directory.scripts import Script
from kvstore.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    OutOfSpace,
    Unavailable,
)

_CONNECTIONS: Final = 64
_SCAN_COUNT: Final = 200

_REFUSALS: Final = (AuthenticationError, AuthorizationError, NoPermissionError)
# asyncio and uvloop say with a RuntimeError that a transport has been closed.
_FAILURES: Final = (RedisError, RedisClusterException, OSError, RuntimeError)


class _Password(CredentialProvider):
    def __init__(self, user: str, read: Callable[[], str | None]) -> None:
        self._user = user
        self._read = read

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._read() or ""
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class Link:
    """A client of Redis, connected when it is first used and again whenever that is needed.

    Args:
        address: where Redis is.
        access: what it asks for.

    Raises:
        ConfigError: a user is given and no password, or a password that can't be read.
    """

    def __init__(self, address: Address, access: Access) -> None:
        self._address = address
        options = self._options(address, access)
        self._sentinel: Sentinel | None = None
        if address.kind == "cluster":
            self._client: Any = _cluster(address, options)
        elif address.kind == "sentinel":
            self._sentinel = _sentinel(address, options, access)
            self._client = self._sentinel.master_for(address.service)
        elif address.kind == "unix":
            self._client = Redis(unix_socket_path=address.path, **_single(address, options))
        else:
            host, port = address.hosts[0]
            self._client = Redis(host=host, port=port, **_single(address, options))
        # Asked of the client it takes as long as packing all that is sent.
        self._clustered = address.kind == "cluster"
        single = address.kind not in ("cluster", "sentinel")
        self._kept = Kept(self._client) if single else None

    def __repr__(self) -> str:
        return f"<Link to {self._address}>"

    @staticmethod
    def _options(address: Address, access: Access) -> dict[str, Any]:
        password = access.password()
        if address.user and password is None:
            raise ConfigError(
                f"the directory's user {address.user!r} needs a password: put it in a file or in "
                f"the variable {PASSWORD_VARIABLE}"
            )
        options: dict[str, Any] = {
            # Every call is bounded here. With bounds of its own, redis-py sends through
            # asyncio.wait_for, which before Python 3.12 can swallow a cancellation.
            "socket_timeout": None,
            "socket_connect_timeout": None,
            "protocol": 2,
        }
        if password is not None:
            options["credential_provider"] = _Password(address.user, access.password)
        if address.tls:
            options |= {
                "ssl": True,
                "ssl_ca_certs": str(access.ca) if access.ca else None,
                "ssl_certfile": str(access.certificate) if access.certificate else None,
                "ssl_keyfile": str(access.key) if access.key else None,
            }
        return options

    async def run(self, script: Script, key: bytes, *arguments: Any, seconds: float) -> Any:
        """Run a script, and return what it returns.

        Args:
            script: which.
            key: the only key that it is given.
            arguments: the others.
            seconds: how long to wait at most.

        Raises:
            KVStoreError: it did not run, or nobody knows whether it ran.
        """
        try:
            async with asyncio.timeout(seconds):
                return await _evaluate(self._do, script, key, arguments)
        except _FAILURES as error:
            raise _translate(error) from error

    async def ask(self, script: Script, key: bytes, *arguments: Any) -> Any:
        """Like ``run``, in less time, for a script that changes nothing: it may run twice.

        It is not bounded here: whoever asks has a bound already, and each takes a timer.

        Raises:
            KVStoreError: there is no answer.
        """
        do = self._do if self._kept is None else self._kept.do
        try:
            return await _evaluate(do, script, key, arguments)
        except _FAILURES as error:
            raise _translate(error) from error

    async def identity(self, *, seconds: float) -> frozenset[str]:
        """What tells the present servers from those after a restart or a failover.

        Raises:
            KVStoreError: they don't say.
        """
        try:
            async with asyncio.timeout(seconds):
                if isinstance(self._client, RedisCluster):
                    answers = [
                        await self._do("INFO", "server", target_nodes=node)
                        for node in await self._masters()
                    ]
                else:
                    answers = [await self._do("INFO", "server")]
        except _FAILURES as error:
            raise _translate(error) from error
        return frozenset(str(answer["run_id"]) for answer in answers)

    async def scan(self, pattern: bytes, *, seconds: float) -> AsyncIterator[list[bytes]]:
        """All keys that match, in pages, of which some may be empty and some keys come twice.

        Args:
            pattern: as Redis writes them.
            seconds: how long to wait for one page at most.

        Raises:
            KVStoreError: a page did not come.
        """
        targets: list[dict[str, Any]] = [{}]
        if isinstance(self._client, RedisCluster):
            try:
                async with asyncio.timeout(seconds):
                    targets = [{"target_nodes": node} for node in await self._masters()]
            except _FAILURES as error:
                raise _translate(error) from error
        for target in targets:
            cursor = 0
            while True:
                cursor, keys = await self._page(cursor, pattern, target, seconds)
                yield keys
                if not cursor:
                    break

    async def _page(
        self, start: int, pattern: bytes, target: dict[str, Any], seconds: float
    ) -> tuple[int, list[bytes]]:
        words = ("SCAN", start, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        try:
            async with asyncio.timeout(seconds):
                cursor, keys = await self._do(*words, **target)
                # Of a cluster it comes by the name of the server, of which there is one here.
                following = next(iter(cursor.values())) if isinstance(cursor, dict) else cursor
                return int(following), list(keys)
        except _FAILURES as error:
            raise _translate(error) from error

    def route(self, key: bytes) -> str:
        """Names the server that a key is at, as far as it is known: it fails or works as one."""
        if not self._clustered:
            return ""
        try:
            node = self._client.get_node_from_key(key.decode())
        except (RedisClusterException, RedisError, LookupError):
            return ""
        return node.name if node is not None else ""

    async def close(self, *, seconds: float) -> None:
        """Close all connections.

        Raises:
            KVStoreError: that did not work in so many seconds.
        """
        try:
            async with asyncio.timeout(seconds):
                if self._kept is not None:
                    await self._kept.close()
                await self._client.aclose()
                if self._sentinel is not None:
                    for sentinel in self._sentinel.sentinels:
                        await sentinel.aclose()
        except _FAILURES as error:
            raise _translate(error) from error

    async def _do(self, *words: Any, **target: Any) -> Any:
        return await self._client.execute_command(*words, **target)

    async def _masters(self) -> list[Any]:
        await self._client.initialize()
        return list(self._client.get_primaries())


async def _evaluate(
    do: Callable[..., Awaitable[Any]], script: Script, key: bytes, arguments: tuple[Any, ...]
) -> Any:
    try:
        return await do("EVALSHA", script.digest, 1, key, *arguments)
    except NoScriptError:
        return await do("EVAL", script.text, 1, key, *arguments)


def _single(address: Address, options: dict[str, Any]) -> dict[str, Any]:
    # What is tried again, and when, is decided by those who call.
    return options | {
        "db": address.database,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": _CONNECTIONS,
    }


def _sentinel(address: Address, options: dict[str, Any], access: Access) -> Sentinel:
    to_sentinels = {key: value for key, value in options.items() if key != "credential_provider"}
    if access.sentinel_password() is not None:
        to_sentinels["credential_provider"] = _Password("", access.sentinel_password)
    return Sentinel(  # type: ignore[no-untyped-call] # its signature lacks types
        list(address.hosts),
        sentinel_kwargs=to_sentinels | {"retry": Retry(NoBackoff(), 0)},
        **_single(address, options),
    )


def _cluster(address: Address, options: dict[str, Any]) -> RedisCluster:
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        # A part that has no master must not keep the others from being used.
        require_full_coverage=False,
        # It is while trying again that the client learns who the masters are by now.
        retry=Retry(ConstantBackoff(0.02), 3),
        max_connections=_CONNECTIONS,
        **options,
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _translate(error: Exception) -> KVStoreError:
    text = f"Redis: {type(error).__name__}: {error}"[:300]
    if isinstance(error, TimeoutError | RedisTimeout):
        return DeadlineExceeded(text)
    if any(isinstance(cause, _REFUSALS) for cause in _causes(error)):
        return AccessDenied(text)
    if "OOM" in text:
        return OutOfSpace(text)
    return Unavailable(text)
