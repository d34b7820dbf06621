"""Quantities as people write them: sizes, durations, shares, rates and socket addresses.

Every ``parse_*`` function accepts the machine's form (a number) as well as the human one
(``"8GiB"``, ``"500ms"``, ``"85%"``) and raises ``ValueError`` with a sentence that says what was
expected. Sizes are bytes, durations seconds, shares fractions between 0 and 1.
"""

import ipaddress
import re
from typing import Final, NamedTuple

_DECIMAL: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY: Final = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40, "pi": 1 << 50}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgtp]i?|)b?", re.IGNORECASE)
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|m|h|d)", re.IGNORECASE)
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_SIZE: Final = 1 << 60


def parse_size(value: object) -> int:
    """Bytes of ``8GiB`` (powers of 1024), ``8GB`` (powers of 1000), ``4096`` or an int."""
    if isinstance(value, bool):
        raise ValueError("expected a size such as 8GiB, not a boolean")
    if isinstance(value, int):
        return _bounded_size(value)
    if isinstance(value, str):
        if value.strip().startswith("-"):
            raise ValueError(f"a size cannot be negative: {value!r}")
        found = _SIZE.fullmatch(value.strip())
        if found:
            unit = found[2].lower()
            return _bounded_size(round(float(found[1]) * (_BINARY | _DECIMAL)[unit]))
    raise ValueError(f"expected a size such as 8GiB or 8GB, not {value!r}")


def _bounded_size(size: int) -> int:
    if size < 0:
        raise ValueError(f"a size cannot be negative: {size}")
    if size > _MAX_SIZE:
        raise ValueError(f"a size cannot be above 1 EiB: {size}")
    return size


def parse_rate(value: object) -> int:
    """Bytes per second of ``200MB/s``, ``200MiB`` or an int."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return parse_size(text)


def parse_duration(value: object) -> float:
    """Seconds of ``500ms``, ``10s``, ``1h30m`` or a plain number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a duration must be finite and not negative: {value}")
        return seconds
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
        if text and not _DURATION_PART.sub("", text).strip():
            parts = _DURATION_PART.findall(text)
            return float(sum(float(amount) * _SECONDS[unit.lower()] for amount, unit in parts))
    raise ValueError(f"expected a duration such as 500ms, 10s or 1h30m, not {value!r}")


def parse_share(value: object) -> float:
    """A fraction between 0 and 1, written ``0.85`` or ``85%``."""
    share: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        share = float(value)
    elif isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?\s*%?", value.strip()):
        text = value.strip()
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"expected a share between 0 and 1 (or 0% and 100%), not {value!r}")
    return share


class Address(NamedTuple):
    """Where a socket listens: a host name or IP address, and a port (0 means any free one)."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def unspecified(self) -> bool:
        """Whether it means all addresses of a machine, so that nobody else can connect to it."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def parse_address(value: object) -> Address:
    """An ``Address`` from ``127.0.0.1:9400``, ``[::1]:9400`` or ``host:9400``."""
    if isinstance(value, Address):
        return value
    if isinstance(value, str):
        host, colon, port = value.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        plain = re.fullmatch(r"[A-Za-z0-9._-]+", host) is not None
        sound = _is_ipv6(host) if bracketed else plain
        if colon and sound and re.fullmatch(r"\d{1,5}", port) and int(port) < 65536:
            return Address(host, int(port))
    raise ValueError(f"expected an address such as 127.0.0.1:9400 or [::1]:9400, not {value!r}")


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def format_size(size: int) -> str:
    """A size for people: exact for whole binary units (``8 GiB``), else one decimal."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            number = f"{size // factor}" if size % factor == 0 else f"{size / factor:.1f}"
            return f"{number} {unit}"
    return f"{size} B"


def format_duration(seconds: float) -> str:
    """A duration for people, with two leading units at most (``3h 12m``, ``4.2s``, ``18us``)."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    for big, small, label_big, label_small in (
        (86400, 3600, "d", "h"),
        (3600, 60, "h", "m"),
        (60, 1, "m", "s"),
    ):
        if whole >= big:
            return f"{whole // big}{label_big} {whole % big // small}{label_small}"
    return f"{whole}s"
