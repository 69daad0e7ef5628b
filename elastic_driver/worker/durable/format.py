"""The file of one durable commit: a JSON header, the raw bytes of arrays and tensors, a digest.

elastic_driver.system.commit_file owns the frame around header and data, which shows whether a file is whole. A file
cannot name code, and reading one calls only the constructors of the types listed here.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from elastic_driver.errors import DurableError
from elastic_driver.system.commit_file import ALIGN, DIGEST_BYTES, MAGIC, PREFIX, layout
from elastic_driver.system.safe_files import open_inside

_CHUNK_BYTES = 4 << 20
_NUMPY_KINDS = "biufcSUmM"
_JSON_INT = 1 << 62
_MAX_DEPTH = 200

# Exact type -> tag, for types made from a list of their items.
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
}
_SEQUENCE_OF: dict[str, Callable[[list[Any]], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_MAPPING_OF: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": lambda pairs: collections.Counter(dict(pairs)),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state that is ready to be written; its arrays and tensors are still the caller's."""

    header: bytes
    parts: list[tuple[int, Any]]  # offset in the data, and the array or tensor
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return -(-(PREFIX.size + len(self.header)) // ALIGN) * ALIGN + self.data_bytes + DIGEST_BYTES


def _torch() -> Any:
    # A state holds tensors only if its process has imported torch.
    return sys.modules.get("torch")


def _kind_of(value: Any) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{name} of dtype {value.dtype}"
    if not hasattr(value, "layout"):
        return name
    nested = "nested " if value.is_nested else ""
    return f"{nested}{name} of layout {value.layout}{' on the meta device' if value.is_meta else ''}"


def _shown(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # an integer of more digits than Python prints
        return f"a {type(key).__name__}"


class _Encoder:
    def __init__(self) -> None:
        self.parts: list[tuple[int, Any]] = []
        self.end = 0

    def _place(self, value: Any, size: int) -> int:
        start = -(-self.end // ALIGN) * ALIGN
        self.parts.append((start, value))
        self.end = start + size
        return start

    def encode(self, value: Any, where: str, depth: int = 0) -> Any:
        kind = type(value)
        if depth > _MAX_DEPTH:
            raise DurableError(f"cannot write state.{where} to disk: it is nested deeper than {_MAX_DEPTH}")
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_JSON_INT < value < _JSON_INT else ["int", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", struct.pack("<d", value).hex()]
        if kind in _SEQUENCES:
            items = [self.encode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
            limit = value.maxlen if kind is collections.deque else None
            return [_SEQUENCES[kind], items, *([] if limit is None else [limit])]
        if kind in _MAPPINGS:
            pairs = [
                [self.encode(k, f"{where} (a key)", depth + 1), self.encode(v, f"{where}[{_shown(k)}]", depth + 1)]
                for k, v in value.items()
            ]
            return [_MAPPINGS[kind], pairs, *self._attributes(value, where, depth)]
        if kind is bytes or kind is bytearray:
            return [kind.__name__, base64.b64encode(value).decode()]
        if kind is complex:
            return ["complex", struct.pack("<dd", value.real, value.imag).hex()]
        if kind is range:
            return ["range", [self.encode(v, where) for v in (value.start, value.stop, value.step)]]
        if kind is np.ndarray and _is_kept(value.dtype):
            return ["array", value.dtype.str, list(value.shape), self._place(value, value.nbytes), value.nbytes]
        if isinstance(value, np.generic) and kind is value.dtype.type and _is_kept(value.dtype):
            return ["scalar", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
        encoded = self._encode_torch(value)
        if encoded is not None:
            return encoded
        raise DurableError(
            f"cannot write state.{where} to disk: it is a {_kind_of(value)}; durable commits hold numbers, "
            "strings, bytes, None, lists, tuples, sets, dicts, NumPy arrays, dense tensors, and objects with a "
            "state_dict"
        )

    def _attributes(self, mapping: Any, where: str, depth: int) -> list[Any]:
        attributes = dict(getattr(mapping, "__dict__", ()))
        # Versions of modules: a state_dict carries them as an attribute, and load_state_dict reads them.
        metadata = attributes.pop("_metadata", None)
        if not attributes and metadata is None:
            return []
        beside = [self.encode(metadata, f"{where} (its _metadata)", depth + 1)]
        if attributes:
            beside.append(self.encode(attributes, f"{where} (its attributes)", depth + 1))
        return beside

    def _encode_torch(self, value: Any) -> Any:
        torch = _torch()
        if torch is None:
            return None
        if isinstance(value, torch.dtype):
            return ["torch.dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["torch.device", str(value)]
        if isinstance(value, torch.Size):
            return ["torch.Size", list(value)]
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.is_nested or value.is_meta:
            return None
        size = value.numel() * value.element_size()
        dtype = str(value.dtype).removeprefix("torch.")
        place = self._place(value, size)
        return ["tensor", dtype, list(value.shape), place, size, value.requires_grad, value.device.type]


def encode(values: dict[str, Any], **facts: Any) -> Encoded:
    """Plan a file. Arrays and tensors are neither read nor copied.

    Args:
        values: attribute -> value.
        **facts: plain values for the header, such as the job.

    Raises:
        DurableError: a value cannot be stored; names the attribute.
    """
    encoder = _Encoder()
    tree = {name: encoder.encode(value, name) for name, value in values.items()}
    header = json.dumps({**facts, "values": tree}, allow_nan=False, separators=(",", ":")).encode()
    return Encoded(header, encoder.parts, encoder.end)


def _bytes_of(value: Any) -> memoryview:
    if isinstance(value, np.ndarray):
        if not value.nbytes:  # NumPy's copies of empty strings are one character wide
            return memoryview(b"")
        return memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    if not value.numel():
        return memoryview(b"")
    tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Even one element may have a stride, which its view as bytes must not have.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(_torch().uint8).numpy(force=True))


def _pieces(encoded: Encoded) -> Iterator[bytes | memoryview]:
    yield PREFIX.pack(MAGIC, len(encoded.header), encoded.data_bytes)
    yield encoded.header
    yield bytes(-(PREFIX.size + len(encoded.header)) % ALIGN)
    at = 0
    for start, value in encoded.parts:
        yield bytes(start - at)
        view = _bytes_of(value)
        for low in range(0, len(view), _CHUNK_BYTES):
            yield view[low : low + _CHUNK_BYTES]
        at = start + len(view)


def write(encoded: Encoded, file: BinaryIO) -> None:
    """Write a whole file, in pieces of a few MB, between which other threads run."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in _pieces(encoded):
        digest.update(piece)
        file.write(piece)
    file.write(digest.digest())


class _Decoder:
    def __init__(self, data: memoryview) -> None:
        self.data = data

    def decode(self, node: Any) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise ValueError("a JSON object in place of a value")
            return node
        tag, *rest = node
        if tag in _SEQUENCE_OF:
            items = [self.decode(item) for item in rest[0]]
            return collections.deque(items, rest[1]) if len(rest) > 1 else _SEQUENCE_OF[tag](items)
        if tag in _MAPPING_OF:
            return self._mapping(tag, *rest)
        match tag:
            case "int":
                return int(rest[0], 16)
            case "float":
                return struct.unpack("<d", bytes.fromhex(rest[0]))[0]
            case "complex":
                return complex(*struct.unpack("<dd", bytes.fromhex(rest[0])))
            case "bytes":
                return base64.b64decode(rest[0])
            case "bytearray":
                return bytearray(base64.b64decode(rest[0]))
            case "range":
                return range(*map(self.decode, rest[0]))
            case "array":
                return self._array(*rest)
            case "scalar":
                return _scalar(_dtype(rest[0]), base64.b64decode(rest[1]))
            case "tensor" | "torch.dtype" | "torch.device" | "torch.Size":
                return self._decode_torch(tag, rest)
            case _:
                raise ValueError(f"unknown kind of value {tag!r}")

    def _mapping(self, tag: str, pairs: list[Any], metadata: Any = None, attributes: Any = None) -> Any:
        mapping = _MAPPING_OF[tag]([(self.decode(key), self.decode(value)) for key, value in pairs])
        if metadata is not None:
            mapping._metadata = self.decode(metadata)
        if attributes is not None:
            vars(mapping).update(self.decode(attributes))
        return mapping

    def _bytes(self, start: int, size: int) -> memoryview:
        if not 0 <= start <= start + size <= len(self.data):
            raise ValueError("an array lies outside the data")
        return self.data[start : start + size]

    def _array(self, dtype: str, shape: list[int], start: int, size: int) -> np.ndarray[Any, Any]:
        kind, data = _dtype(dtype), self._bytes(start, size)
        if not kind.itemsize:  # empty strings, which frombuffer cannot count
            return np.ndarray(shape, kind)
        return np.frombuffer(data, kind).reshape(shape).copy()

    def _decode_torch(self, tag: str, rest: list[Any]) -> Any:
        import torch

        if tag == "torch.device":
            return torch.device(rest[0])
        if tag == "torch.Size":
            return torch.Size(rest[0])
        dtype = getattr(torch, rest[0], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this PyTorch has no dtype {rest[0]!r}")
        if tag == "torch.dtype":
            return dtype
        _, shape, start, size, requires_grad, device = rest
        view = self._bytes(start, size)
        # The data may be read-only or unaligned: copy it to memory of the tensor's own.
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if tensor.numel() * tensor.element_size() != size:
            raise ValueError("a tensor's bytes do not fit its shape")
        if size:
            tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(view, dtype=torch.uint8))
        return tensor.to(device).requires_grad_(requires_grad)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    # An array's strings end before trailing zeros; a scalar's zeros are its own. For "" tobytes() gives one zero.
    if dtype.kind in "SU":
        data = data[: dtype.itemsize]
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
    return np.frombuffer(data, dtype)[0]


def _is_kept(dtype: np.dtype[Any]) -> bool:
    """Return whether the dtype's name describes it fully; those of other packages' dtypes do not."""
    try:
        return dtype.kind in _NUMPY_KINDS and np.dtype(dtype.str) == dtype
    except TypeError:
        return False


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"arrays of {text!r} are not supported")
    return dtype


def load(path: Path) -> bytearray:
    """Return the bytes of a file after verifying its digest.

    Raises:
        DurableError: the file is torn, changed, or of another kind; one line with its name.
        OSError: it cannot be read.
    """
    with os.fdopen(open_inside(path, os.O_RDONLY), "rb") as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        length = file.readinto(content)
    try:
        if length < len(content):
            raise ValueError(f"only {length} of {len(content)} bytes could be read")
        layout(content, len(content))
        body = memoryview(content)[:-DIGEST_BYTES]
        if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != content[-DIGEST_BYTES:]:
            raise ValueError("its digest does not match")
    except ValueError as error:
        raise DurableError(f"{path} is not a complete commit: {error}") from error
    return content


def decode(content: bytearray, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Decode a file's bytes to the header's facts, and attribute -> value.

    Raises:
        DurableError: they are something else, or contain an unknown type; one line with the file's name.
    """
    try:
        end, begin = layout(content, len(content))
        view = memoryview(content)
        facts = json.loads(bytes(view[PREFIX.size : end]))
        decoder = _Decoder(view[begin:-DIGEST_BYTES])
        values = {name: decoder.decode(node) for name, node in facts.pop("values").items()}
    except Exception as error:  # a file's bytes can make the parsers raise anything
        raise DurableError(f"{path} is not a complete commit: {error}") from error
    return facts, values


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load and decode a file."""
    return decode(load(path), path)


def facts_of(path: Path) -> dict[str, Any]:
    """Return the header's facts alone, unverified.

    Raises:
        DurableError: it is a file of another kind.
        OSError: it cannot be read.
    """
    try:
        with os.fdopen(open_inside(path, os.O_RDONLY), "rb") as file:
            magic, header_bytes, _ = PREFIX.unpack(file.read(PREFIX.size))
            if magic != MAGIC or header_bytes > os.fstat(file.fileno()).st_size:
                raise ValueError("it does not start like a commit")
            facts = json.loads(file.read(header_bytes))
            del facts["values"]
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise DurableError(f"{path} is not a complete commit: {error}") from error
    return dict(facts)
