"""Training on a GPU by every strategy, mesh, schedule and gate: the losses of the host.

Traffic and memory are as predicted.  The ranks are threads.
"""

from __future__ import annotations

import pytest

from tests.parallel.run.device_runs import RUNS, trained

pytestmark = pytest.mark.gpu
CLOSE = 1e-9
# Where numbers are rounded to few bits, and a rounding may go the other way.
ROUNDED = {
    "float16": 1e-2,
    "zeropp": 1e-2,
    "ddp, float16 hook": 1e-3,
    "ddp, int8 hook": 1e-2,
    "ddp, PowerSGD 4": 1e-6,
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_the_host(name: str) -> None:
    on_host, on_device = trained(name), trained(name, "--device", "cuda")
    for device_run, host_run in zip(on_device, on_host, strict=True):
        assert device_run.losses == pytest.approx(host_run.losses, rel=ROUNDED.get(name, CLOSE))
