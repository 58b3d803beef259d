"""The common part of EfficientZero's models: three networks, their steps and their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from raffia.algorithms.efficientzero.actions import ContinuousActions, DiscreteActions
from raffia.algorithms.efficientzero.lightzero import read_lightzero
from raffia.algorithms.efficientzero.projection import prediction_head, projection
from raffia.algorithms.efficientzero.steps import Imagine, Represent, imagine, represent
from raffia.functional.transforms import Support, categorical_to_scalar, precise, signed_parabolic
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
            self.projection = projection(size, hidden, out, activation, projection_norm_type)
            self.prediction_head = prediction_head(
                out, head_hidden, head_out, activation, projection_norm_type
            )

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
            f"without a categorical distribution there is one output, got {list(logits.shape)}"
        )
    return signed_parabolic(precise(logits.squeeze(-1)))
