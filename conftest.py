import gc
import signal

import pytest
import torch

from raffia.functional.exact import request_exact_products

gc.disable()  # until all is collected: of many modules and tests nothing is garbage


def pytest_collection_finish(session):
    gc.freeze()  # else each `gc.collect()` of a test looks through them all
    gc.enable()


def pytest_configure(config):
    # Two OpenMP threads on a busy machine can cost 20 ms a region; one also repeats bit for bit.
    torch.set_num_threads(1)
    request_exact_products()  # before the first product of a test
    # A shell starts what runs in the background deaf to Ctrl-C, and its children inherit that:
    # tests that send it to them would wait for ever.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is none."""
    if torch.cuda.is_available():
        return
    absent = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(absent)


@pytest.fixture(autouse=True)
def examples_see_the_public_names(request):
    """An example in a docstring starts after `import torch` and `from raffia import *`.

    What its own module calls by such a name stays what it is there.
    """
    if not isinstance(request.node, pytest.DoctestItem) or request.node.dtest is None:
        return
    import raffia

    names = request.node.dtest.globs
    for name in ["torch", *raffia.__all__]:
        if name not in names:
            names[name] = torch if name == "torch" else getattr(raffia, name)
