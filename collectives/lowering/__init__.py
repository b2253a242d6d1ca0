"""Lowering: what the device of each rank does in a call, without CUDA; and its proof."""

from collectives.lowering.blocks import Step, can_be_kernel, in_steps
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
from collectives.lowering.spans import Spans
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
    "Spans",
    "Step",
    "can_be_kernel",
    "in_order",
    "in_steps",
    "lower",
    "verify_lowered",
]
