"""Devices: calls on GPU arrays, whose data goes from the memory of one device to another's."""

from collectives.devices.call import DeviceCall
from collectives.devices.check import Check
from collectives.devices.devices import DEVICE_MODES, DeviceMode, Devices
from collectives.devices.direct import DirectMemory
from collectives.devices.drivers import driver_of
from collectives.devices.execution import OnDevice
from collectives.devices.loop import compiled as enqueue_loop
from collectives.devices.messages import ENVELOPE, End, Tagged

__all__ = [
    "DEVICE_MODES",
    "ENVELOPE",
    "Check",
    "DeviceCall",
    "DeviceMode",
    "Devices",
    "DirectMemory",
    "End",
    "OnDevice",
    "Tagged",
    "driver_of",
    "enqueue_loop",
]
