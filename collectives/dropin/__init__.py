"""What `collectives.Intracomm` is made of: mpi4py's spelling of calls, on the library's own.

Only what `collectives/intracomm.py` needs; it and these files import mpi4py.
"""
