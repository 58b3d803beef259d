import signal

import pytest
import torch


def pytest_configure(config):
    # Two OpenMP threads on a busy machine can cost 20 ms a region; one also repeats bit for bit.
    torch.set_num_threads(1)
    # A shell starts what runs in the background deaf to Ctrl-C, and its children inherit that:
    # tests that send it to them would wait for ever.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def examples_see_the_public_names(doctest_namespace):
    """An example in a docstring starts after `import torch` and `from raffia import *`."""
    import raffia

    doctest_namespace |= {"torch": torch} | {name: getattr(raffia, name) for name in raffia.__all__}
