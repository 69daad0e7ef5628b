"""A rank's plan, as text that ranks compare; and the error if the texts differ.

For ``PlainEngine``. Owns the texts and the error messages, which equal those of the native engine.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind, Operation

# The gathered tensors may be an optimizer's gradients.
_SPARSE_HINT = " (for sparse gradients: DistributedOptimizer(..., sparse_as_dense=True))"

# Kinds whose members may differ in the tensors' first dimensions, which are therefore not part of the plan.
_FREE_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)


def encode(operation: Operation) -> str:
    """Return the part of an operation on which the members must agree."""
    free = operation.kind in _FREE_ROWS
    return json.dumps(
        {
            "operation": operation.kind.name.lower(),
            "name": operation.name,
            "own": operation.own,
            "tensors": [[spec.dtype, list(spec.shape[1:] if free else spec.shape)] for spec in operation.tensors],
            "root": operation.root,
            "op": int(operation.reduce_op),
            "prescale_factor": operation.prescale,
            "postscale_factor": operation.postscale,
        }
    )


def digest(text: str) -> int:
    """Hash a text to 63 bits, which ranks compare first."""
    data = text.encode()
    return zlib.crc32(data) << 31 ^ zlib.adler32(data)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def title(plan: dict[str, Any]) -> str:
    """Return ``allreduce 'gradients'``."""
    return f"{plan['operation']} '{plan['name'] or plan['operation']}'"


def disagreement(texts: Sequence[tuple[int, str]]) -> str:
    """Return the error for plans that are not all alike; each camp is compared with the largest."""
    camps: dict[str, list[int]] = {}
    for rank, text in texts:
        camps.setdefault(text, []).append(rank)
    most = max(camps, key=lambda text: (len(camps[text]), -camps[text][0]))
    reference = json.loads(most)
    parts = []
    for text, ranks in camps.items():
        if text == most:
            continue
        part = _difference(reference, camps[most][0], json.loads(text), ranks[0])
        if len(ranks) > 1:
            part += f" (as {ranks_text(ranks[1:])} {'has' if len(ranks) == 2 else 'have'})"
        parts.append(part)
    return f"cannot {title(reference)}: {'; '.join(parts)}"


def _difference(first: dict[str, Any], first_rank: int, other: dict[str, Any], other_rank: int) -> str:
    def say(field: str, value: object, other_value: object) -> str:
        return f"rank {first_rank} has {field} {value}, rank {other_rank} has {field} {other_value}"

    if first["operation"] != other["operation"]:
        return say("operation", first["operation"], other["operation"])
    if first["name"] != other["name"]:
        return (
            say("name", repr(first["name"]), repr(other["name"]))
            + " (without the native extension all ranks must submit operations in the same order)"
        )
    tensors, other_tensors = first.get("tensors", []), other.get("tensors", [])
    if len(tensors) != len(other_tensors):
        return say("number of tensors", len(tensors), len(other_tensors))
    for (dtype, shape), (other_dtype, other_shape) in zip(tensors, other_tensors, strict=True):
        if dtype != other_dtype:
            return say("dtype", dtype, other_dtype)
        if shape != other_shape:
            free = first["operation"] in [kind.name.lower() for kind in _FREE_ROWS]
            return say("shape", _shape(shape, free=free), _shape(other_shape, free=free))
    if first.get("root") != other.get("root"):
        return say("root rank", first.get("root"), other.get("root"))
    if first.get("op") != other.get("op"):
        names = [ReduceOp(plan["op"]).name.capitalize() for plan in (first, other)]
        return say("op", *names)
    for field in sorted(first):
        if first[field] != other.get(field):
            return say(field, first[field], other.get(field))
    return "they differ"


def _shape(extents: list[int], *, free: bool) -> str:
    return f"({', '.join(map(str, ['rows', *extents]))})" if free else str(tuple(extents))


def objection(plan: dict[str, Any], joined: Sequence[int]) -> str:
    """Return why an operation cannot run while some ranks have joined; "" if it can."""
    if plan["operation"] == "allreduce":
        return ""
    have = f"{ranks_text(joined)} {'has' if len(joined) == 1 else 'have'} joined"
    hint = _SPARSE_HINT if plan["operation"] == "allgather" else ""
    return f"cannot {title(plan)}: {plan['operation']} is not supported while {have}{hint}"
