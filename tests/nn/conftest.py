from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributions import Distribution


@pytest.fixture(autouse=True)
def checks_of_distributions(request):
    """Importing torch._dynamo switches them off permanently, as it cannot trace them.

    Tests share a process; the checks are on in each test that does not compile.
    """
    before = Distribution._validate_args
    compiles = any(word in request.node.nodeid for word in ("compil", "export", "dynamo"))
    Distribution.set_default_validate_args(not compiles)
    yield
    Distribution.set_default_validate_args(before)


@pytest.fixture
def in_threads():
    """Runs `work(i)` in eight threads concurrently, and raises their errors."""

    def run(work):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))

    return run
