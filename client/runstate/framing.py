"""Frames: bytes in, (request id, body) out. No socket; used by the daemon and by the client.

A frame is a big-endian unsigned 32-bit length, then that many bytes: a big-endian unsigned 64-bit request id and a
msgpack body. The id stands outside the body so that one encoded reply can go to many waiting calls.
"""

from struct import Struct

FRAME_BYTES_MAX = 8 * 1024 * 1024  # a gather of 100 inputs of 64 KiB, with room; a longer length is noise

_HEADER = Struct(">IQ")
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from
_HEADER_BYTES = _HEADER.size
_ID_BYTES = 8


class FrameError(Exception):
    """The bytes are not frames: the length is above FRAME_BYTES_MAX or too short to hold an id."""


def pack(request_id: int, body: bytes) -> bytes:
    """One frame.

    Raises FrameError when the body is larger than a frame may be.
    """
    if len(body) > FRAME_BYTES_MAX - _ID_BYTES:
        raise FrameError(f"a message of {len(body)} bytes exceeds the frame limit of {FRAME_BYTES_MAX} bytes")
    return _pack_header(len(body) + _ID_BYTES, request_id) + body


class Splitter:
    """Collects bytes as they come and gives out whole frames."""

    __slots__ = ("_need", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._need = 0  # bytes until there can be a whole frame: a slow sender must not cost a copy for each byte

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now, as (request id, body).

        Raises FrameError as soon as a length cannot be right; the stream is of no use after that.
        """
        if not self._rest and len(data) >= _HEADER_BYTES:
            length, request_id = _unpack_header(data)
            if length + 4 == len(data) and _ID_BYTES <= length <= FRAME_BYTES_MAX:  # one whole frame: nearly always
                return [(request_id, data[_HEADER_BYTES:])]
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames, at = _split(data)
        if at < len(data):
            self._rest += data[at:] if at else data
            self._need = _HEADER_BYTES
            if len(self._rest) >= _HEADER_BYTES:
                self._need = 4 + int.from_bytes(self._rest[:4], "big")
        return frames


def _split(data: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """The whole frames at the start of ``data``, and where the rest begins."""
    frames = []
    at, end = 0, len(data)
    while end - at >= _HEADER_BYTES:
        length, request_id = _unpack_header(data, at)
        _check(length)
        stop = at + 4 + length
        if stop > end:
            break
        frames.append((request_id, data[at + _HEADER_BYTES : stop]))
        at = stop
    return frames, at


def _check(length: int) -> None:
    if not _ID_BYTES <= length <= FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {length} bytes is outside {_ID_BYTES} to {FRAME_BYTES_MAX} bytes")
