import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

HERE = Path(__file__).parent
CONFIGS = json.loads((HERE / "model.json").read_text())["models"]


@pytest.fixture(params=CONFIGS)
def oracle(request):
    """A network of LightZero's: its name, arguments, weights, and all recorded tensors."""
    name = request.param
    tensors = load_file(HERE / f"{name}.safetensors")
    weights = {k.removeprefix("param/"): v for k, v in tensors.items() if k.startswith("param/")}
    return name, CONFIGS[name], weights, tensors
