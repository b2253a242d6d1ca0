"""Export: programs as files that other simulators and runtimes read (GOAL, SMPI, MSCCL, Chakra)."""

from collectives.export.arguments import at_least_one, num_bytes, output_file
from collectives.export.call import Call
from collectives.export.files import summary, unwritable, write, write_text
from collectives.export.smpi import platform
from collectives.export.tasks import Stream, Task, tag, tasks_of
from collectives.selection import machine_in, programs
from collectives.simulation import Machine

__all__ = [
    "Call",
    "Machine",
    "Stream",
    "Task",
    "at_least_one",
    "machine_in",
    "num_bytes",
    "output_file",
    "platform",
    "programs",
    "summary",
    "tag",
    "tasks_of",
    "unwritable",
    "write",
    "write_text",
]
