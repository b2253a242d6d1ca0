"""Export: programs as files that other simulators and runtimes read (GOAL, SMPI, MSCCL, Chakra)."""

from collectives.export.call import Call
from collectives.export.files import summary, write, write_text
from collectives.export.smpi import platform
from collectives.export.tasks import Stream, Task, tag, tasks_of
from collectives.selection import machine_in, programs
from collectives.simulation import Machine

__all__ = [
    "Call",
    "Machine",
    "Stream",
    "Task",
    "machine_in",
    "platform",
    "programs",
    "summary",
    "tag",
    "tasks_of",
    "write",
    "write_text",
]
