"""What a rank computes in a step: micro-batches on their way through its layers, and back.

A forward and a backward may overlap.  `Overlap` measures how much communication is hidden.
"""

from parallel.run.computing.alternation import Alternation
from parallel.run.computing.micro_batches import MicroBatches
from parallel.run.computing.overlap import Overlap
from parallel.run.computing.stash import WeightStash
from parallel.run.computing.units import Units

__all__ = ["Alternation", "MicroBatches", "Overlap", "Units", "WeightStash"]
