"""How fast the convolutions of the paper's Atari networks go: one by one, and as a CUDA graph.

Plans for larger runs assume 20 TFLOP/s of small convolutions that are started one by one, and 60 in
bfloat16 as CUDA graphs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device_cost import Call, cost_of, seconds_per_call
from benchmarks.device_figures import Effort, Figure, Group, Measure
from benchmarks.device_run import FRAME
from benchmarks.search_report import digits
from raffia.algorithms.efficientzero.config import ModelConfig
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.model import make_model
from raffia.nn.cudagraphs import Card

STACK = 4
NUM_IMAGES, NUM_STATES = 256, 1_518  # of a batch; of a batch that are reanalyzed
WARMUPS = 3


@dataclass(frozen=True)
class Variant:
    """How a network is run.

    >>> VARIANTS[0].dtype
    torch.float32
    """

    name: str
    dtype: torch.dtype
    graph: bool = False
    channels_last: bool = False

    @property
    def precision(self) -> str:
        """Of its convolutions."""
        return "bfloat16" if self.dtype == torch.bfloat16 else "tf32"

    def prepare(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module on the device, in this variant's dtype and memory format."""
        module = module.to(device, self.dtype)
        layout: Any = {"memory_format": torch.channels_last} if self.channels_last else {}
        return module.to(**layout) if layout else module

    def images(self, *size: int, device: torch.device) -> Tensor:
        """Noise [B, C, H, W]."""
        made = torch.rand(size, device=device).to(self.dtype)
        return made.contiguous(memory_format=torch.channels_last) if self.channels_last else made


VARIANTS = (
    Variant("one by one, float32", torch.float32),
    Variant("one by one, bfloat16", torch.bfloat16),
    Variant("graph, float32", torch.float32, graph=True),
    Variant("graph, bfloat16", torch.bfloat16, graph=True),
    Variant("graph, bfloat16, channels last", torch.bfloat16, graph=True, channels_last=True),
)
ASSUMED = {"one by one, float32": 20.0, "graph, bfloat16": 60.0}  # TFLOP/s, by plans
MakeCall = Callable[[Variant, Effort], Call]


def networks() -> LatentModel:
    """The paper's, for stacks of four frames."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_model(FRAME, ModelConfig(), frame_stack=STACK)


def model_and_images(variant: Variant, effort: Effort) -> tuple[nn.Module, Tensor]:
    """The residual tower that looks at images, and a batch of them."""
    network = variant.prepare(networks().representation_network, effort.device)
    channels, *rest = FRAME.observation_shape
    size = (4 if effort.small else NUM_IMAGES, STACK * channels, *rest)
    return network, variant.images(*size, device=effort.device)


def forward(variant: Variant, effort: Effort) -> Call:
    """The tower's outputs."""
    network, images = model_and_images(variant, effort)
    network.eval()

    @torch.no_grad()
    def call() -> Tensor:
        return network(images)

    return call


def backward(variant: Variant, effort: Effort) -> Call:
    """Outputs and gradients of all weights, with BatchNorm as in training."""
    network, images = model_and_images(variant, effort)
    weights = [*network.train().parameters()]

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(network(images).square().mean(), weights)

    return call


def simulation(variant: Variant, effort: Effort) -> Call:
    """Dynamics and prediction of all states at once: the networks' part of a simulation."""
    model, device = networks().eval(), effort.device
    variant.prepare(model, device)
    num = 8 if effort.small else NUM_STATES
    latent = variant.images(num, *model.latent_shape, device=device)
    size = (1, num, model.lstm_hidden_size)
    h, c = (torch.zeros(size, dtype=variant.dtype, device=device) for _ in range(2))
    action = torch.zeros(num, dtype=torch.int64, device=device)

    @torch.no_grad()
    def call() -> object:
        return model.recurrent_inference(latent, (h, c), action)

    return call


SUBJECTS: dict[str, MakeCall] = {
    "tower, forward": forward,
    "tower, forward and backward": backward,
    "a simulation's networks": simulation,
}


def replayed(call: Call, device: torch.device) -> Call:
    """The call as a CUDA graph: run aside first, then recorded; what it reads stays where it is."""
    card = Card(device)
    for _ in range(WARMUPS):
        card.warm(call)
    output, replay = card.record(call)

    def again() -> object:
        replay()
        return output, call  # the graph reads and writes what they hold

    return again


def constants(effort: Effort) -> Iterator[tuple[str, Measure]]:
    """Each network in each variant; graphs only on a card."""
    for subject, make in SUBJECTS.items():
        for variant in VARIANTS:
            if not variant.graph or effort.device.type == "cuda":
                name = f"{subject}, {variant.name}"
                yield name, partial(_measured, name, make, variant, effort)


def _measured(name: str, make: MakeCall, variant: Variant, effort: Effort) -> Figure:
    call = make(variant, effort)
    cost = cost_of(call)
    timed = replayed(call, effort.device) if variant.graph else call
    seconds = seconds_per_call(timed, effort.device, effort.seconds)
    return Figure(name, seconds, {"calls": 1.0}, cost, variant.precision)


def against_plans(figures: Iterable[Figure]) -> list[str]:
    """What was assumed, and what the networks reached.

    >>> from benchmarks.device_cost import Cost
    >>> cost = Cost(flops=3e13)
    >>> against_plans([Figure("tower, graph, bfloat16", 1.0, {}, cost)])
    ['graph, bfloat16: 30.0 to 30.0 TFLOP/s, where plans assume 60']
    """
    found, lines = list(figures), []
    for variant, assumed in ASSUMED.items():
        rates = [f.cost.flops / f.seconds / 1e12 for f in found if f.name.endswith(variant)]
        if rates:
            least, most = digits(min(rates)), digits(max(rates))
            lines.append(f"{variant}: {least} to {most} TFLOP/s, where plans assume {assumed:g}")
    return lines


GROUPS: dict[str, Group] = {"convolutions": constants}
