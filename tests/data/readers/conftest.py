"""Each format that is read."""

import pytest

from tests.data.readers.forms import FORMATS


@pytest.fixture(params=FORMATS)
def form(request):
    return FORMATS[request.param]


@pytest.fixture(params=[name for name, form in FORMATS.items() if not form.by_step])
def whole(request):
    """A format that holds an episode in one piece, with T + 1 observations."""
    return FORMATS[request.param]
