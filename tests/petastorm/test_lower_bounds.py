"""The data layer runs on the oldest libraries that setup.cfg allows: Petastorm's environment has them."""

import pytest

from tests.petastorm.conftest import PYTHON, run_there

TESTS = ("data/columns", "data/external", "data/petastorm", "test_spec.py", "test_storage.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_unit_tests_pass_there():
    if not PYTHON.exists():
        pytest.skip("no .venv-petastorm; `make setup-petastorm` makes it (Python 3.11)")
    names = [f"tests/unit/{name}" for name in TESTS]
    done = run_there("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *names, timeout_s=280)
    assert done.returncode == 0, done.stdout[-4000:]
