"""Who is timed beside whom: our plans and calls, MPI's, NCCL's and Gloo's, and what limits them.

``ring bench all_reduce --native --limits`` measures all of them; add one here to compare with
another library.
"""
