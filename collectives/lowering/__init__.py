"""Lowering: what the device of each rank does in a call, without CUDA; and its proof."""

from collectives.lowering.lower import lower
from collectives.lowering.operations import (
    MOST_OPERANDS,
    SYNCHRONIZING,
    Counter,
    DeviceKind,
    DeviceOperation,
    DeviceProgram,
    Place,
)
from collectives.lowering.order import in_order
from collectives.lowering.verify import LoweredCall, verify_lowered

__all__ = [
    "MOST_OPERANDS",
    "SYNCHRONIZING",
    "Counter",
    "DeviceKind",
    "DeviceOperation",
    "DeviceProgram",
    "LoweredCall",
    "Place",
    "in_order",
    "lower",
    "verify_lowered",
]
