"""What a benchmark calls: a collective of some size, datatype, operator and root; and its result.

A user says it with the options of ``ring bench COLLECTIVE``; a developer finds here the
buffers of a call, the result that it must have, and the algorithms that can make it.
"""
