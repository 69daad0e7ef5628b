"""Which values can be reduced, in which dtype they are sent, and what the engine computes for them."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_driver.errors import UnsupportedOperationError
from elastic_driver.worker.engine.collectives import DTYPES, ReduceOp

# Reduced in a wider type that engines carry: sums that fit the narrow type stay the same.
_WIDENED = {"int16": "int32", "uint16": "int32"}
# A sum of booleans is "any", a product is "all".
_BOOLEAN_OPS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def carried_dtype(name: str, op: ReduceOp) -> str:
    """Return the dtype in which values of the named dtype are reduced.

    Raises:
        TypeError: they cannot be reduced.
    """
    if op is ReduceOp.ADASUM and "float" not in name:
        raise TypeError(f"cannot reduce values of dtype {name} with Adasum: it is for floating point only")
    if name == "bool" and op is not ReduceOp.AVERAGE:
        return "uint8"
    carried = _WIDENED.get(name, name)
    if carried not in DTYPES:
        known = ", ".join((*DTYPES, *_WIDENED, "bool (not averaged)"))
        raise TypeError(f"cannot reduce values of dtype {name}: the dtypes are {known}")
    return carried


def check_scattered(op: ReduceOp) -> None:
    """Raise UnsupportedOperationError, whatever the dtype, if results of this operation cannot be scattered."""
    if op is ReduceOp.ADASUM:
        raise UnsupportedOperationError(
            "cannot reducescatter with Adasum, which weighs whole tensors: use allreduce, or another op"
        )


def engine_op(names: Iterable[str], op: ReduceOp) -> ReduceOp:
    """Return the engine's reduction for this operation on values of the named dtypes.

    Raises:
        TypeError: booleans are grouped with others, and the operation means something else for them.
    """
    ops = {_BOOLEAN_OPS.get(op, op) if name == "bool" else op for name in names}
    if len(ops) > 1:
        raise TypeError("cannot reduce booleans in one group with other values: group them separately")
    return ops.pop() if ops else op
