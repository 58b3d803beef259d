"""A folded `EfficientZeroModelMLP` in compiled calls: one for the roots, one a simulation.

Plain networks of linear layers are read off modules and written as a `DenseProgram`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.actions import DiscreteActions
from raffia.algorithms.efficientzero.folding import JointLSTM
from raffia.algorithms.efficientzero.heads import EXPONENTS, GaussianHead
from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.model_mlp import (
    DynamicsNetworkMLP,
    PredictionNetworkMLP,
    RepresentationNetworkMLP,
)
from raffia.functional.transforms import Support
from raffia.jit.dense_program import ColumnBuffer, DenseProgram, bind_group
from raffia.nn.blocks import DirectSequential, has_hooks
from raffia.search.base import SearchMemory
from raffia.tensordict.tensordict import TensorDict


def compiled_recurrent(model: LatentModel) -> CompiledRecurrent | None:
    """The compiled step of the folded model; None if a layer has no compiled form.

    >>> from raffia.algorithms.efficientzero.folding import Folding
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModel, EfficientZeroModelMLP
    >>> compiled_recurrent(Folding(EfficientZeroModelMLP(4, 2)).model) is not None
    True
    >>> compiled_recurrent(Folding(EfficientZeroModel((1, 3, 3), 2)).model) is None
    True
    """
    dynamics, heads = _dynamics(model), _heads(model)
    if dynamics is None or heads is None or not _is_plain(model):
        return None
    encoding = model.action_encoding
    codes = encoding.codes if isinstance(encoding, DiscreteActions) else None
    return CompiledRecurrent(codes, dynamics, heads)


def compiled_root(model: LatentModel) -> CompiledRoot | None:
    """The folded model's representation and prediction, None as in `compiled_recurrent`."""
    network, heads = model.representation_network, _heads(model)
    if type(network) is not RepresentationNetworkMLP or heads is None or not _is_plain(model):
        return None
    read = _all_layers([network.fc_representation])
    norm = network.norm
    if read is None or type(norm) is not nn.LayerNorm or norm.bias is None:
        return None
    last = read[0][-1]
    if last.norm is not None or last.activation is not None:
        return None
    return CompiledRoot(read[0], norm, heads)


class CompiledRecurrent:
    """The compiled step of one simulation, in the memory of a search.

    >>> from raffia.algorithms.efficientzero.inference import fold
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.search.base import SearchMemory
    >>> folded = fold(EfficientZeroModelMLP(4, 2))
    >>> memory = SearchMemory(
    ...     embeddings=folded.root(torch.zeros(6, 4)).embedding,
    ...     parent_row=torch.tensor([0, 3]), node_row=torch.tensor([1, 4]),
    ...     action=torch.tensor([1, 0]), reset=torch.tensor([False, True]),
    ...     reward=torch.empty(2), value=torch.empty(2), prior_logits=torch.empty(2, 2))
    >>> step = folded.recurrent_fn.bind(memory)
    >>> step(2)
    >>> memory.value
    tensor([0., 0.])
    """

    def __init__(self, codes: Tensor | None, dynamics: _Dynamics, heads: Heads) -> None:
        self._codes = codes  # [A, E], of the actions; None: they are continuous
        self._first = dynamics.latent[0].linear
        self._latent_size = dynamics.latent[-1].linear.out_features
        width, num_inputs = self._first.weight.shape
        self._action_row = () if codes is not None else (num_inputs - self._latent_size,)
        # what the first layer makes of each action, with its bias
        self._of_action = self._first.weight.new_empty(width, 0 if codes is None else len(codes))
        self._hidden_size = dynamics.lstm.hidden_size if dynamics.lstm is not None else 0
        self._layers = CompiledLayers()
        self._write(dynamics, heads)
        self.load()

    def _write(self, dynamics: _Dynamics, heads: Heads) -> None:
        layers, program = self._layers, self._layers.program
        size, hidden = self._latent_size, self._hidden_size
        latent = program.read("latent", size, index="parent_row")
        features: ColumnBuffer | None = None
        if dynamics.lstm is not None:
            features, h, both = program.neighbours(size, hidden)
            program.read("h", hidden, index="parent_row", out=h)
            c = program.read("c", hidden, index="parent_row")

        start = self._write_action()
        if dynamics.features:
            new = layers.mlp(dynamics.latent, latent, onto=start, added=latent)
            output = layers.mlp(dynamics.features, new, out=features)
        else:
            output = new = layers.mlp(dynamics.latent, latent, onto=start, out=features)
        program.write(new, "latent", index="node_row")

        if dynamics.lstm is not None:
            weights = dynamics.lstm.weight.split([size, hidden], 1)
            layers.parameters += [*weights, dynamics.lstm.bias]
            output = program.lstm(output, h, both, c)
            program.write(output, "h", index="node_row", zero="reset")
            program.write(c, "c", index="node_row", zero="reset")
        layers.scalar(dynamics.reward, output, "reward", dynamics.support)
        layers.heads(heads, new)

    def _write_action(self) -> ColumnBuffer:
        """Add what the first layer makes of the action, with its bias."""
        program, parameters = self._layers.program, self._layers.parameters
        width, num_actions = self._of_action.shape
        if self._codes is not None:
            parameters.append(self._of_action)
            return program.look_up(num_actions, width, index="action")
        parameters += [self._first.weight[:, self._latent_size :], self._first.bias]
        return program.dense(program.read("action", *self._action_row), width)

    def load(self) -> None:
        """Load the present parameters."""
        if self._codes is not None:
            bias, of_action = self._first.bias, self._first.weight[:, self._latent_size :]
            torch.addmm(bias.unsqueeze(1), of_action, self._codes.t(), out=self._of_action)
        self._layers.load()

    @property
    def program(self) -> DenseProgram:
        """The program that works in a search's memory."""
        return self._layers.program

    def bind(self, memory: SearchMemory) -> Callable[[int], None] | None:
        """Bind the step to the memory of a search, as `FoldedRecurrentFn.bind` does."""
        arrays = self.arrays(memory)
        return None if arrays is None else self.program.bind(arrays)

    def arrays(self, memory: SearchMemory) -> dict[str, Tensor] | None:
        """The arrays that the program reads and writes; None where it cannot use them."""
        action, dtype = memory.action, torch.int64 if self._codes is not None else torch.float32
        if not isinstance(memory.embeddings, TensorDict):
            return None
        if action.shape[1:] != self._action_row or action.dtype != dtype:
            return None
        found = {
            "latent": memory.embeddings.get("latent_state", None),
            "h": memory.embeddings.get(("reward_hidden_state", "h"), None),
            "c": memory.embeddings.get(("reward_hidden_state", "c"), None),
        }
        widths = self._latent_size, self._hidden_size, self._hidden_size
        for array, width in zip(found.values(), widths, strict=True):
            if array is None or not _is_float32_here(array) or array.shape[1:] != (width,):
                return None
        return found | vars(memory)


def bind_members(
    steps: Sequence[CompiledRecurrent],  # P, of models of the same form
    memory: SearchMemory,  # whose embeddings have "member" int64 [R], 0..P-1
) -> Callable[[int], None] | None:
    """`CompiledRecurrent.bind` for the rows of P members, each by its member's step.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> from raffia.algorithms.efficientzero.stacked import StackedModel
    >>> from raffia.search.base import SearchMemory
    >>> models = StackedModel(EfficientZeroModelMLP(4, 2), size=2)
    >>> memory = SearchMemory(
    ...     embeddings=models.root(torch.zeros(6, 4)).embedding,
    ...     parent_row=torch.tensor([0, 3]), node_row=torch.tensor([1, 4]),
    ...     action=torch.tensor([1, 0]), reset=torch.tensor([False, True]),
    ...     reward=torch.empty(2), value=torch.empty(2), prior_logits=torch.empty(2, 2))
    >>> models.recurrent_fn.bind(memory)(2)
    >>> memory.value
    tensor([0., 0.])
    """
    arrays = steps[0].arrays(memory)
    member = None if arrays is None else memory.embeddings.get("member", None)
    if arrays is None or member is None or not member.is_cpu or not member.is_contiguous():
        return None
    programs = [step.program for step in steps]
    return bind_group(programs, arrays, member, read="parent_row", written="node_row")


class CompiledRoot:
    """The compiled root: from observations to latent states, values and policies.

    >>> from raffia.algorithms.efficientzero.folding import Folding
    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> root = compiled_root(Folding(EfficientZeroModelMLP(4, 2, latent_state_dim=8)).model)
    >>> latent, value, prior_logits = root(torch.zeros(3, 4))
    >>> latent.shape, value, prior_logits.shape
    (torch.Size([3, 8]), tensor([0., 0., 0.]), torch.Size([3, 2]))
    """

    def __init__(self, representation: list[Layer], norm: nn.LayerNorm, heads: Heads) -> None:
        self._size = representation[0].linear.in_features
        self._latent_size = representation[-1].linear.out_features
        self._num_logits = heads.num_logits
        self._layers = layers = CompiledLayers()
        last = representation[-1]._replace(norm=norm)
        observation = layers.program.read("observation", self._size)
        latent = layers.mlp([*representation[:-1], last], observation)
        layers.program.write(latent, "latent")
        layers.heads(heads, latent)
        self.load()

    def load(self) -> None:
        """Load the present parameters."""
        self._layers.load()

    def __call__(
        self,
        observation: Tensor,  # float32 [B, observation_size], on the CPU
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """latent state [B, D], value [B], policy logits [B, A]; None for other observations."""
        if observation.shape[1:] != (self._size,) or not _is_float32_here(observation):
            return None
        rows = observation.size(0)
        latent, value = observation.new_empty(rows, self._latent_size), observation.new_empty(rows)
        prior_logits = observation.new_empty(rows, self._num_logits)
        arrays = {
            "observation": observation.contiguous(),
            "latent": latent,
            "value": value,
            "prior_logits": prior_logits,
        }
        self._layers.program.run(arrays, rows)
        return latent, value, prior_logits


class _Dynamics(NamedTuple):
    """The layers of a simulation up to the value prefix."""

    latent: list[Layer]  # layers from a latent state, with the action, to the next
    features: list[Layer]  # layers from there to the LSTM's input; empty: the next latent itself
    lstm: JointLSTM | None  # None without a value prefix, as in MuZero
    reward: list[Layer]
    support: Support | None


def _dynamics(model: LatentModel) -> _Dynamics | None:
    network = model.dynamics_network
    if type(network) is not DynamicsNetworkMLP:
        return None
    if network.res_connection:
        networks = [network.fc_dynamics_1, network.fc_dynamics_2, network.fc_reward_head]
    else:
        networks = [network.fc_dynamics, nn.Sequential(), network.fc_reward_head]
    read, lstm = _all_layers(networks), cast(nn.Module | None, network.lstm)
    if read is None or len(read[0]) < 2 or not isinstance(lstm, JointLSTM | None):
        return None
    latent, features, reward = read
    return _Dynamics(latent, features, lstm, reward, model.reward_support)


def _heads(model: LatentModel) -> Heads | None:
    network = model.prediction_network
    if type(network) is not PredictionNetworkMLP:
        return None
    head: nn.Module = network.fc_policy_head
    gaussian = head if isinstance(head, GaussianHead) else None
    logits = head if gaussian is None else gaussian.net
    read = _all_layers([network.fc_prediction_common, network.fc_value_head, logits])
    if read is None:
        return None
    common, value, policy = read
    return Heads(common, value, policy, model.value_support, gaussian)


def _is_plain(model: LatentModel) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    # The mean of a support of one number does not depend on any logit.
    constant = any(
        support is not None and support.size == 1
        for support in (model.reward_support, model.value_support)
    )
    if model.state_norm or constant or any(map(has_hooks, model.modules())):
        return False
    return all(map(_is_float32_here, tensors))


class Layer(NamedTuple):
    """A linear layer with its bias and activation."""

    linear: nn.Linear
    norm: nn.LayerNorm | None = None
    activation: str | None = None  # "relu", "gelu" (the approximation by tanh)


class Heads(NamedTuple):
    """The layers from a latent state to value and policy."""

    common: list[Layer]
    value: list[Layer]
    policy: list[Layer]
    support: Support | None  # support of the value
    gaussian: GaussianHead | None  # None: the policy is over discrete actions

    @property
    def num_logits(self) -> int:
        """The columns of "prior_logits"; of continuous actions, their means and deviations."""
        if self.gaussian is not None:
            return 2 * self.gaussian.action_size
        return self.policy[-1].linear.out_features


class CompiledLayers:
    """A program in the making, and the tensors that its parameters are copied from.

    >>> from torch import nn
    >>> layers = CompiledLayers()
    >>> network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> out = layers.mlp(_read_layers(network), layers.program.read("x", 3))
    >>> layers.program.write(out, "y")
    >>> layers.load()
    >>> x, y = torch.ones(4, 3), torch.empty(4, 2)
    >>> layers.program.bind({"x": x, "y": y})(4)
    >>> torch.testing.assert_close(y, network(x))
    """

    def __init__(self) -> None:
        self.program = DenseProgram()
        self.parameters: list[Tensor] = []
        self._loaded = False

    def mlp(
        self,
        layers: list[Layer],
        inputs: ColumnBuffer,
        *,
        onto: ColumnBuffer | None = None,  # holds what the first layer's sums start with
        added: ColumnBuffer | None = None,  # to the result
        out: ColumnBuffer | None = None,
        behind: float = 0.0,
    ) -> ColumnBuffer:
        """Add layers one after the other.

        Where the first one has more inputs than there are, `onto` holds what the rest gives.
        """
        for number, (linear, norm, activation) in enumerate(layers, start=1):
            last = number == len(layers)
            self.parameters.append(linear.weight[:, : inputs.width])
            if onto is None:
                self.parameters.append(linear.bias)
            relu, gelu = activation == "relu", activation == "gelu"
            to_add = added if last else None
            result = self.program.dense(
                inputs,
                linear.out_features,
                relu=relu and norm is None,
                onto=onto,
                added=None if norm or gelu else to_add,
                out=out if last else None,
                behind=behind if last else 0.0,
            )
            if norm is not None:
                self.parameters += [norm.weight, norm.bias]
                self.program.norm(result, norm.eps, relu=relu, added=None if gelu else to_add)
            if gelu:
                self.program.gelu(result, added=to_add)
            if number > 1:
                self.program.reuse(inputs)
            inputs, onto = result, None
        return inputs

    def scalar(
        self, layers: list[Layer], inputs: ColumnBuffer, array: str, support: Support | None
    ) -> None:
        """Add layers, then the decoding of their output as a value."""
        logits = self.mlp(layers, inputs, behind=0.0 if support is None else -math.inf)
        if support is not None:
            self.parameters.append(support.values(device="cpu"))
        self.program.decode(logits, array)
        self.program.reuse(logits)

    def heads(self, heads: Heads, latent: ColumnBuffer) -> None:
        """Add the heads, which write the arrays "value" and "prior_logits"."""
        common = self.mlp(heads.common, latent)
        self.scalar(heads.value, common, "value", heads.support)
        logits = self.program.buffer(heads.num_logits)
        self.mlp(heads.policy, common, out=logits)
        if heads.gaussian is not None:
            self.program.gaussian(logits, *EXPONENTS, fixed=heads.gaussian.fixed_sigma)
        self.program.write(logits, "prior_logits")

    def load(self) -> None:
        """Load the present parameters."""
        if self._loaded:
            self.program.reload()
        else:
            self.program.load(self.parameters)
        self._loaded = True


def _read_layers(network: nn.Module) -> list[Layer] | None:
    """The layers of a plain network, None if it has others.

    >>> from torch import nn
    >>> layers = _read_layers(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.ReLU()))
    >>> [layer.activation for layer in layers]
    ['relu']
    >>> _read_layers(nn.Sequential(nn.Linear(3, 2), nn.Dropout())) is None
    True
    """
    plain = type(network) in (nn.Sequential, DirectSequential)
    if not (plain and isinstance(network, nn.Sequential)):
        return None
    layers: list[Layer] = []
    for part in network:
        if type(part) is nn.Linear and part.bias is not None:
            layers.append(Layer(part))
        elif type(part) is not nn.Identity:
            layer = _with(layers[-1], part) if layers else None
            if layer is None:
                return None
            layers[-1] = layer
    return layers


def _with(layer: Layer, part: nn.Module) -> Layer | None:
    if layer.activation is not None:
        return None
    if type(part) is nn.ReLU:
        return layer._replace(activation="relu")
    if isinstance(part, nn.GELU) and part.approximate == "tanh":
        return layer._replace(activation="gelu")
    if type(part) is nn.LayerNorm and layer.norm is None and part.bias is not None:
        return layer._replace(norm=part)
    return None


def _all_layers(networks: Sequence[nn.Module]) -> list[list[Layer]] | None:
    """The layers of several networks, None if one of them has others."""
    read = [layers for network in networks if (layers := _read_layers(network)) is not None]
    return read if len(read) == len(networks) else None


def _is_float32_here(tensor: Tensor) -> bool:
    """Whether compiled code can read the tensor.

    >>> _is_float32_here(torch.zeros(1)), _is_float32_here(torch.zeros(1, dtype=torch.int64))
    (True, False)
    """
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"
