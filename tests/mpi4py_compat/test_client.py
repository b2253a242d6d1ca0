"""A program of somebody else's, with its own tests, runs on our collectives unchanged.

It is pylops-mpi, whose wheel contains its tests.  A few files of them are run here.  By hand, all:

    python -m collectives.launch -n 3 --drop-in --traffic -m pytest --with-mpi --noconftest FILES
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.launch import launch

pytestmark = [pytest.mark.timeout(400), pytest.mark.ranks(n=3), pytest.mark.on_open_mpi]

ROOT = Path(__file__).parents[2]
PACKAGE = "pylops-mpi==0.8.0"
FILES = {"test_stack.py": 12, "test_fredholm.py": 6}  # and how many tests each has
NUM_RANKS = 3


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pylops-mpi and what it needs, without what this environment has."""
    folder = tmp_path_factory.mktemp("client")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (place,) = folder.glob("lib/python*/site-packages")
    (place / "ours.pth").write_text(ours)
    pip = [sys.executable, "-m", "pip", f"--python={folder}/bin/python", "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-compile", PACKAGE], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.fail(f"pip could not install {PACKAGE}:\n{done.stdout}{done.stderr}", pytrace=False)
    return place


def test_the_tests_of_pylops_mpi_pass_and_their_traffic_is_shown(client: Path) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(client)])}
    tests = [str(client / "tests" / name) for name in FILES]
    pytest_ = ["-m", "pytest", "-q", "--with-mpi", "--noconftest", "--color=no"]
    done = launch(
        NUM_RANKS,
        [*pytest_, "-p", "no:cacheprovider", *tests],
        timeout=300,
        env=env,
        capture=True,
        drop_in=True,
        traffic=True,
    )
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert (
        re.findall(r"^(\d+) passed, ", done.stdout, re.MULTILINE)
        == [str(sum(FILES.values()))] * NUM_RANKS
    )
    total = re.search(r"^\| total .*\| +3 \| +(\d+) \| +(\d+) \| +(\d+) \|$", done.stdout, re.M)
    assert total and all(int(number) > 1000 for number in total.groups()), output
    assert re.search(r"^\| pylops_mpi/DistributedArray.py:\d+ +\| all_gather", done.stdout, re.M)
