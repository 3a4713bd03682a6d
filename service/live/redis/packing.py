"""Packing the arguments of a step for the scripts."""

from __future__ import annotations

import struct

import msgspec

Key = str

_BLOB = struct.Struct(">BI")


def blob(data: bytes) -> msgspec.Raw:
    """Wrap bytes for `pack`: Redis unpacks strings of bytes, but not MessagePack's own type."""
    return msgspec.Raw(_BLOB.pack(0xDB, len(data)) + data)


def pack(value: object) -> bytes:
    """Pack the arguments of a step."""
    return msgspec.msgpack.encode(value)
