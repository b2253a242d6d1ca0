"""Tagged messages of which an end is on a device: in order, and from device to device if it can.

The sender copies its array, on its stream, to a box: memory that the receiver can read.  MPI
carries an envelope, which says where the box is.  The receiver reads the box on its stream.  So
neither host waits for a device.  Other messages are staged in host memory.
"""

from collectives.devices.messages.boxes import ENVELOPE
from collectives.devices.messages.mail import Mail, Route
from collectives.devices.messages.passage import End
from collectives.devices.messages.tagged import Tagged

__all__ = ["ENVELOPE", "End", "Mail", "Route", "Tagged"]
