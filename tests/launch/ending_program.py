"""Run under mpirun by `test_ending.py`: how a program may end.  Argument: which way."""

from __future__ import annotations

import atexit
import sys

import numpy as np


def late_call() -> None:
    """A handler that was registered before the communicator was made, and so runs after its own."""

    def call() -> None:
        for comm in made:
            comm(print)

    made: list = []
    atexit.register(call)
    from mpi4py import MPI

    import collectives

    drop_in = collectives.Intracomm(MPI.COMM_WORLD)
    threaded = collectives.world(progress="thread")
    x, out = np.ones(3), np.empty(3)
    drop_in.Iallreduce(x, out).Wait()

    def with_requests(say) -> None:
        drop_in.Iallreduce(x, out).Wait()
        request = drop_in.Allreduce_init(x, out)
        request.Start()
        request.Wait()
        say(f"rank {MPI.COMM_WORLD.rank} requests {out[0]:g}", flush=True)

    def with_thread(say) -> None:
        total = threaded.all_reduce(x, async_op=True).wait()
        say(f"rank {MPI.COMM_WORLD.rank} thread {total[0]:g}", flush=True)

    def with_waits_of_mpi(say) -> None:
        MPI.Request.Waitall([drop_in.Iallreduce(x, out), drop_in.Iallreduce(x, np.empty(3))])
        say(f"rank {MPI.COMM_WORLD.rank} Waitall {out[0]:g}", flush=True)

    made += [with_requests, with_thread, with_waits_of_mpi]


def first_call() -> None:
    """The first calls of the program are those of a handler."""

    @atexit.register
    def call() -> None:
        from mpi4py import MPI

        import collectives

        x, out = np.ones(3), np.empty(3)
        collectives.Intracomm(MPI.COMM_WORLD).Iallreduce(x, out).Wait()
        total = collectives.world(progress="thread").all_reduce(x, async_op=True).wait()
        is_imported = "numba" in sys.modules
        print(f"rank {MPI.COMM_WORLD.rank} {out[0]:g} {total[0]:g} {is_imported}", flush=True)


def late_futures() -> None:
    """Futures of PyTorch in a handler that runs when the library's thread has ended."""

    @atexit.register
    def call() -> None:
        x, mine = torch.ones(3), dist.get_rank()
        dist.all_reduce(x, async_op=True).get_future().wait()
        sending, found = dist.isend(x, 1 - mine), torch.zeros(3)
        dist.irecv(found).get_future().wait()
        sending.wait()
        dist.destroy_process_group()
        print(f"rank {mine} futures {found[0]:g}", flush=True)

    import torch
    import torch.distributed as dist

    dist.init_process_group("ring")
    dist.all_reduce(torch.ones(1), async_op=True).wait()


def unawaited(progress: str | None) -> None:
    """Large calls are under way on some ranks when the program ends."""
    import collectives

    comm = collectives.world(progress=progress)
    x = np.ones(2_000_000)
    works = [comm.all_reduce(x + step, async_op=True) for step in range(3)]
    if comm.rank == 0:
        works.append(comm.recv(np.empty(1_000_000), 1 % comm.size, async_op=True))
    print(f"rank {comm.rank} leaves {len(works)} calls", flush=True)


def freed() -> None:
    """The world is made anew after it was freed."""
    import collectives

    first = collectives.world()
    first.free()
    again = collectives.world()
    assert again is not first and again is collectives.world()
    print(f"rank {again.rank} again {again.all_reduce(np.ones(1))[0]:g}", flush=True)


if __name__ == "__main__":
    {
        "late": late_call,
        "first": first_call,
        "futures": late_futures,
        "unawaited": lambda: unawaited(None),
        "threaded": lambda: unawaited("thread"),
        "freed": freed,
    }[sys.argv[1]]()
