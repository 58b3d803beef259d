"""The common part of EfficientZero's models: three networks, their keys, and their two steps.

A model is asked for a latent state of an observation, `represent`, and for the next one by an
action, `imagine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, cat, nn

from raffia.algorithms.efficientzero.actions import ContinuousActions, DiscreteActions
from raffia.algorithms.efficientzero.lightzero import read_lightzero
from raffia.functional.transforms import Support, categorical_to_scalar, precise, signed_parabolic
from raffia.functional.trees import is_traced
from raffia.nn.blocks import mlp, norm_of_vectors
from raffia.nn.module import TensorDictModule


class NetworkOutput(NamedTuple):
    """The outputs of a model at one latent state.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> output = EfficientZeroModelMLP(4, 2).initial_inference(torch.zeros(3, 4))
    >>> output.value.shape, output.value_prefix.shape, output.latent_state.shape
    (torch.Size([3, 601]), torch.Size([3]), torch.Size([3, 256]))
    """

    value: Tensor  # [B, F] logits, [B, 1] without a categorical distribution
    value_prefix: Tensor  # [B, F'] or [B, 1], as `value`; zeros [B] from an observation
    policy_logits: Tensor  # [B, A]; of continuous actions [B, 2 D], means and deviations
    latent_state: Tensor  # [B, C, h, w] or [B, D]
    reward_hidden_state: tuple[Tensor, Tensor]  # h and c of the LSTM, each [1, B, L]


class LatentModel(nn.Module):
    """The common part of `EfficientZeroModel` and `EfficientZeroModelMLP`.

    A subclass builds the networks: observation -> latent state; (latent state with the action's
    code, (h, c)) -> the next ones and the value prefix; latent state -> policy and value.

    latent_shape: of one latent state, without batch.
    sizes_of_projection: proj_hid, proj_out, pred_hid, pred_out; None for no projection.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> isinstance(EfficientZeroModelMLP(4, 2), LatentModel)
    True
    """

    def __init__(
        self,
        *,
        representation_network: nn.Module,
        dynamics_network: nn.Module,
        prediction_network: nn.Module,
        action_encoding: DiscreteActions | ContinuousActions,
        latent_shape: Sequence[int],
        lstm_hidden_size: int,
        reward_support: Support | None,
        value_support: Support | None,
        state_norm: bool,
        sizes_of_projection: tuple[int, int, int, int] | None,
        activation: nn.Module,
        projection_norm_type: str,
    ) -> None:
        super().__init__()
        self.representation_network = representation_network
        self.dynamics_network = dynamics_network
        self.prediction_network = prediction_network
        self.action_encoding = action_encoding
        self.latent_shape = tuple(latent_shape)
        self.lstm_hidden_size = lstm_hidden_size
        self.reward_support, self.value_support = reward_support, value_support
        self.state_norm = state_norm
        self.projection: nn.Sequential | None = None
        self.prediction_head: nn.Sequential | None = None
        if sizes_of_projection is not None:
            size = torch.Size(latent_shape).numel()
            hidden, out, head_hidden, head_out = sizes_of_projection
            # Three layers, all with normalisation, the last without activation (SimSiam).
            norm: dict[str, Any] = {"norm_type": projection_norm_type, "activation": activation}
            self.projection = mlp([size, hidden, hidden, out], **norm)
            self.projection.append(norm_of_vectors(projection_norm_type, out))
            self.prediction_head = mlp([out, head_hidden, head_out], **norm)

    def initial_inference(
        self,
        obs: Tensor,  # [B, *observation_shape]
    ) -> NetworkOutput:
        """The model's output for an observation; value prefix and (h, c) are zeros."""
        latent = represent(self.representation_network, obs, self.state_norm)
        policy, value = self.prediction_network(latent)
        zeros = latent.new_zeros(1, len(latent), self.lstm_hidden_size)
        return NetworkOutput(
            value, latent.new_zeros(len(latent)), policy, latent, (zeros, zeros.clone())
        )

    def recurrent_inference(
        self,
        latent_state: Tensor,  # [B, *latent_shape]
        reward_hidden_state: tuple[Tensor, Tensor],  # h, c: each [1, B, L]
        action: Tensor,  # integers [B]; of continuous actions floats [B, D]
    ) -> NetworkOutput:
        """The model's output for the state that an action leads to."""
        latent, state, prefix = imagine(
            self.dynamics_network,
            latent_state,
            self.action_encoding(action),
            reward_hidden_state,
            self.state_norm,
        )
        policy, value = self.prediction_network(latent)
        return NetworkOutput(value, prefix, policy, latent, state)

    def project(
        self,
        latent_state: Tensor,  # [B, *latent_shape]
        with_grad: bool = True,
    ) -> Tensor:  # [B, proj_out]
        """The projection that consistency compares: of an imagined state with its gradient and
        through the prediction head, of an observed one (`with_grad=False`) without either and
        without a graph.

        Source: Chen & He (2021), SimSiam.
        """
        if self.projection is None or self.prediction_head is None:
            raise RuntimeError(
                "this model was built without a projection: pass "
                "self_supervised_learning_loss=True to its constructor"
            )
        if with_grad:
            return self.prediction_head(self.projection(latent_state.flatten(1)))
        with torch.no_grad():
            return self.projection(latent_state.flatten(1))

    def decode_value(
        self,
        logits: Tensor,  # [*, F], or [*, 1]
    ) -> Tensor:  # [*]
        """The values that the network's output stands for."""
        return _decode(logits, self.value_support)

    def decode_reward(
        self,
        logits: Tensor,  # [*, F'], or [*, 1]
    ) -> Tensor:  # [*]
        """The value prefixes that the network's output stands for, by the support of rewards."""
        return _decode(logits, self.reward_support)

    @property
    def representation(self) -> TensorDictModule:
        """A keyed module: "observation" -> "latent_state".

        It, `dynamics` and `prediction` are made at each access around the model's own
        networks; so the model's state holds these once, and a network put in later counts.
        """
        step = Represent(self.representation_network, self.state_norm)
        return TensorDictModule(step, ["observation"], ["latent_state"])

    @property
    def dynamics(self) -> TensorDictModule:
        """A keyed module: "latent_state", "action" and "reward_hidden_state" -> the next latent
        state and hidden state under the same keys, and "value_prefix" [B, F'].

        The hidden state is nested, ("reward_hidden_state", "h") and (..., "c"), each [B, L].
        """
        step = Imagine(self.dynamics_network, self.action_encoding, self.state_norm)
        state = [("reward_hidden_state", "h"), ("reward_hidden_state", "c")]
        return TensorDictModule(
            step, ["latent_state", "action", *state], ["latent_state", *state, "value_prefix"]
        )

    @property
    def prediction(self) -> TensorDictModule:
        """A keyed module: "latent_state" -> "policy_logits" [B, A] and "value" [B, F]."""
        return TensorDictModule(
            self.prediction_network, ["latent_state"], ["policy_logits", "value"]
        )

    def load_lightzero(self, state_dict: dict[str, Tensor]) -> Self:
        """Load the weights of a published LightZero model; returns the model.

        state_dict: the model's own, as in `checkpoint["model"]`.
        Raises ValueError if an entry is unknown, missing or of another shape, and stays as it is.

        Where LightZero keeps BatchNorm although norm_type is "LN", this model does from then on;
        so load before an optimiser is made.
        """
        read_lightzero(self, state_dict)
        return self


def supports(
    reward: Sequence[float], value: Sequence[float], categorical: bool
) -> tuple[Support | None, Support | None]:
    """The supports of reward and value of (start, stop, step); None where there are no categories.

    >>> supports((-5, 6, 1), (-300, 301, 1), categorical=True)[0]
    Support(start=-5, stop=6, step=1)
    """
    found = Support(*reward), Support(*value)  # a wrong range is a mistake without categories, too
    return found if categorical else (None, None)


def _decode(logits: Tensor, support: Support | None) -> Tensor:
    if support is not None:
        return categorical_to_scalar(logits, support)
    if logits.shape[-1] != 1:
        raise ValueError(
            "without a categorical distribution the output must have one value per row; got shape "
            f"{list(logits.shape)}"
        )
    return signed_parabolic(precise(logits.squeeze(-1)))


class Represent(nn.Module):
    """The step from an observation to a latent state.

    network: observation [B, ...] -> latent state [B, ...].
    state_norm: whether the latent state is brought to 0 .. 1, see `_min_max_normalised`.

    >>> from torch import nn
    >>> Represent(nn.Identity(), state_norm=True)(torch.tensor([[1.0, 2.0, 5.0]]))
    tensor([[0.0000, 0.2500, 1.0000]])
    """

    def __init__(self, network: nn.Module, state_norm: bool = False) -> None:
        super().__init__()
        self.network, self.state_norm = network, state_norm

    def forward(self, observation: Tensor) -> Tensor:
        return represent(self.network, observation, self.state_norm)


class Imagine(nn.Module):
    """The step from a latent state, by an action, to the next, with the sum of rewards on the way.

    network: (latent state with the action's code [B, ...], (h, c) of [1, B, L]) -> the next ones,
        and the logits of the value prefix.
    action_encoding: action [B, ...] -> code [B, E].
    state_norm: as in `Represent`.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> model = EfficientZeroModelMLP(4, 2, latent_state_dim=8, lstm_hidden_size=6)
    >>> step = Imagine(model.dynamics_network, model.action_encoding)
    >>> latent, h, c, value_prefix = step(
    ...     torch.zeros(3, 8), torch.tensor([0, 1, 1]), torch.zeros(3, 6), torch.zeros(3, 6)
    ... )
    >>> latent.shape, h.shape, value_prefix.shape
    (torch.Size([3, 8]), torch.Size([3, 6]), torch.Size([3, 601]))
    """

    def __init__(
        self, network: nn.Module, action_encoding: nn.Module, state_norm: bool = False
    ) -> None:
        super().__init__()
        self.network, self.action_encoding = network, action_encoding
        self.state_norm = state_norm

    def forward(
        self,
        latent_state: Tensor,  # [B, ...]
        action: Tensor,  # [B], or [B, D] of continuous actions
        h: Tensor,  # [B, L]
        c: Tensor,  # [B, L]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The next latent state, h, c, and the value prefix's logits [B, F]."""
        code = self.action_encoding(action)
        state = (h.unsqueeze(0), c.unsqueeze(0))
        latent, (h, c), prefix = imagine(self.network, latent_state, code, state, self.state_norm)
        return latent, h.squeeze(0), c.squeeze(0), prefix


def represent(network: nn.Module, observation: Tensor, state_norm: bool) -> Tensor:
    """The latent states of observations, as `Represent` computes them."""
    latent = network(for_convolutions(observation))
    return _min_max_normalised(latent) if state_norm else latent


def imagine(
    network: nn.Module,
    latent_state: Tensor,  # [B, ...]
    code: Tensor,  # [B, E]
    reward_hidden_state: tuple[Tensor, Tensor],  # h, c: each [1, B, L]
    state_norm: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """The next latent state, (h, c), and the value prefix's logits."""
    if len(code) != len(latent_state):
        raise ValueError(
            f"{len(code)} actions were given for {len(latent_state)} latent states; pass one "
            "action for each"
        )
    x = for_convolutions(_with_action(latent_state, code))
    latent, state, prefix = network(x, reward_hidden_state)
    return (_min_max_normalised(latent) if state_norm else latent), state, prefix


def _with_action(
    latent_state: Tensor,  # [B, C, ...]
    code: Tensor,  # [B, E]
) -> Tensor:  # [B, C + E, ...]
    """The latent state with a plane for each number of the action's code after its channels.

    >>> _with_action(torch.zeros(1, 1, 1, 2), torch.tensor([[7.0]])).tolist()
    [[[[0.0, 0.0]], [[7.0, 7.0]]]]
    """
    spatial = latent_state.shape[2:]
    planes = code.reshape(*code.shape, *(1 for _ in spatial)).expand(*code.shape, *spatial)
    return cat([latent_state, planes.to(latent_state.dtype)], 1)


def for_convolutions(x: Tensor) -> Tensor:
    """Images as convolutions in half precision want them: a pixel's channels side by side.

    What follows keeps that order. Where code is traced, the compiler chooses one.

    >>> for_convolutions(torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16)).stride()
    (48, 1, 12, 3)
    """
    if x.dim() != 4 or is_traced() or not _in_half_precision(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _in_half_precision(x: Tensor) -> bool:
    if x.dtype == torch.bfloat16:
        return True
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _min_max_normalised(latent: Tensor) -> Tensor:
    """Each sample shifted and scaled to 0 .. 1; a range below 1e-5 is first widened by 1e-5.

    >>> _min_max_normalised(torch.tensor([[1.0, 2.0, 5.0], [3.0, 3.0, 3.0]]))
    tensor([[0.0000, 0.2500, 1.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    flat = latent.flatten(1)
    low = flat.amin(1, keepdim=True)
    width = flat.amax(1, keepdim=True) - low
    width = torch.where(width < 1e-5, width + 1e-5, width)
    return ((flat - low) / width).reshape(latent.shape)
