"""Run by tests: the same ranks run several commands of the library, one after the other.

Each argument is a command: a module and its words.  Rank 0 prints it before what it prints itself.
The first that fails ends the job.
"""

import importlib
import shlex
import sys

import collectives

BEGIN = "==== "  # before each command

if __name__ == "__main__":
    for command in sys.argv[1:]:
        module, *words = shlex.split(command)
        if collectives.world().rank == 0:
            print(f"{BEGIN}{command}", flush=True)
        if status := importlib.import_module(module).COMMAND.main(words):
            sys.exit(status)
