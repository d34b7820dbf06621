"""Dataclasses of ``kvstore.control.interface`` to protobuf messages and back, field by field.

The two sides have the same field names, so one pair of functions serves them all. None is an absent
field (for bytes and text: an empty one), a tuple a repeated field, a mapping a map, a dataclass a
message.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from kvstore.control import control_pb2 as pb

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def encode(value: Any, message: M) -> M:
    """Fill ``message`` from the dataclass ``value`` and return it.

    Raises:
        ValueError: a value does not fit its field, for example a negative count.
    """
    for field in dataclasses.fields(value):
        name, content = field.name, getattr(value, field.name)
        if content is None:
            continue
        if isinstance(content, Mapping):
            _encode_map(content, getattr(message, name))
        elif isinstance(content, (tuple, list)):
            _encode_list(content, getattr(message, name))
        elif dataclasses.is_dataclass(content):
            encode(content, getattr(message, name))
        else:
            setattr(message, name, content.value if isinstance(content, Enum) else content)
    return message


def _encode_map(content: Mapping[str, object], target: Any) -> None:
    for key, item in content.items():
        if dataclasses.is_dataclass(item):
            encode(item, target[key])
        elif isinstance(target, Mapping) and _holds_messages(target):
            target[key].CopyFrom(_field_value(item))
        else:
            target[key] = item


def _holds_messages(target: Any) -> bool:
    return hasattr(target, "GetEntryClass") and (
        target.GetEntryClass().DESCRIPTOR.fields_by_name["value"].message_type is not None
    )


def _field_value(item: object) -> pb.FieldValue:
    return (
        pb.FieldValue(text=item) if isinstance(item, str) else pb.FieldValue(number=int(str(item)))
    )


def _encode_list(content: tuple[object, ...] | list[object], target: Any) -> None:
    for item in content:
        if dataclasses.is_dataclass(item):
            encode(item, target.add())
        else:
            target.append(item)


def decode(message: Message, kind: type[T]) -> T:
    """A ``kind`` (one of the interface's dataclasses) with the content of ``message``.

    Raises:
        ValueError: text that stands for one of a fixed set is none of them.
    """
    described: Any = kind
    return kind(**{name: read(message, name) for name, read in _readers(described).items()})


@cache
def _readers(kind: Any) -> dict[str, Callable[[Message, str], object]]:
    return {name: _reader(hint) for name, hint in get_type_hints(kind).items()}


def _reader(hint: Any) -> Callable[[Message, str], object]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_optional
    if origin is tuple:
        item = arguments[0]
        if dataclasses.is_dataclass(item) and isinstance(item, type):
            return lambda message, name: tuple(decode(one, item) for one in getattr(message, name))
        return lambda message, name: tuple(getattr(message, name))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _map_reader(arguments[1])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda message, name: hint(getattr(message, name))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return lambda message, name: decode(getattr(message, name), hint)
    return getattr


def _read_optional(message: Message, name: str) -> object:
    if message.DESCRIPTOR.fields_by_name[name].has_presence:
        return getattr(message, name) if message.HasField(name) else None
    return getattr(message, name) or None


def _map_reader(item: Any) -> Callable[[Message, str], object]:
    if dataclasses.is_dataclass(item) and isinstance(item, type):
        return lambda message, name: {
            key: decode(one, item) for key, one in getattr(message, name).items()
        }
    if item == str | int:
        return lambda message, name: {
            key: one.text if one.WhichOneof("value") == "text" else one.number
            for key, one in getattr(message, name).items()
        }
    return lambda message, name: dict(getattr(message, name))
