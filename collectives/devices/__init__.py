"""Devices: calls on GPU arrays, whose data goes from the memory of one device to another's."""

from collectives.devices.call import DeviceCall
from collectives.devices.check import Check
from collectives.devices.devices import DEVICE_MODES, DeviceMode, Devices
from collectives.devices.execution import OnDevice
from collectives.devices.loop import compiled as enqueue_loop

__all__ = [
    "DEVICE_MODES",
    "Check",
    "DeviceCall",
    "DeviceMode",
    "Devices",
    "OnDevice",
    "enqueue_loop",
]
