"""EfficientZero for observations that are vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from raffia.algorithms.efficientzero.actions import action_encoding
from raffia.algorithms.efficientzero.config import check_latent_norm
from raffia.algorithms.efficientzero.heads import (
    HeadOptions,
    LargestHead,
    check_gaussian,
    head,
    policy_head,
)
from raffia.algorithms.efficientzero.latent_model import LatentModel, supports
from raffia.algorithms.efficientzero.networks import check_precision, prefix_lstm, remember
from raffia.nn.blocks import RELU, SimNorm, check_norm_type, mlp

GELU = nn.GELU(approximate="tanh")  # only ever copied


class RepresentationNetworkMLP(nn.Module):
    """The representation network: from a vector to a latent state, in two layers.

    latent_norm: of the latent state: "LN" for LayerNorm, "SimNorm" for a softmax over each eight.

    The last layer starts at random: at zero, all observations would have the same latent state.

    >>> RepresentationNetworkMLP(4, latent_state_dim=8)(torch.zeros(2, 4)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        observation_size: int,
        latent_state_dim: int = 256,
        activation: nn.Module = GELU,
        norm_type: str = "BN",
        latent_norm: str = "LN",
    ) -> None:
        super().__init__()
        check_norm_type(norm_type)
        check_latent_norm(latent_norm, latent_state_dim)
        self.observation_size = observation_size
        sizes = [observation_size, latent_state_dim, latent_state_dim]
        self.fc_representation = mlp(sizes, norm_type=norm_type, activation=activation)
        self.norm = nn.LayerNorm(latent_state_dim) if latent_norm == "LN" else SimNorm()

    def forward(self, observation: Tensor) -> Tensor:
        """observation: floats [B, observation_size] -> [B, latent_state_dim]."""
        if observation.shape[1:] != (self.observation_size,) or not observation.is_floating_point():
            raise ValueError(
                f"observations must be floats of shape [B, {self.observation_size}]; got "
                f"{observation.dtype} of shape {list(observation.shape)}"
            )
        check_precision(observation, cast(nn.Linear, self.fc_representation[0]).weight)
        return self.norm(self.fc_representation(observation))


class DynamicsNetworkMLP(nn.Module):
    """The dynamics network: from a latent state with an action's code to the next latent state and
    the value prefix.

    num_channels: of the input, latent state and action's code together.
    res_connection: the next latent state is the old one and a change; what the LSTM gets is then
        a further network's output. Otherwise the LSTM gets the next latent state itself.
    lstm_hidden_size: width of the LSTM; 0 for MuZero's network, which has none and predicts the
        reward of each step.
    largest_head: of a value prefix's head that can change its form, see `head`.

    >>> network = DynamicsNetworkMLP(10, action_encoding_dim=2, lstm_hidden_size=6)
    >>> latent, (h, c), value_prefix = network(torch.zeros(3, 10), (torch.zeros(1, 3, 6),) * 2)
    >>> latent.shape, h.shape, value_prefix.shape
    (torch.Size([3, 8]), torch.Size([1, 3, 6]), torch.Size([3, 601]))
    """

    def __init__(
        self,
        num_channels: int = 258,
        action_encoding_dim: int = 2,
        reward_head_hidden_channels: Sequence[int] = (32,),
        output_support_size: int = 601,
        lstm_hidden_size: int = 512,
        last_linear_layer_init_zero: bool = True,
        activation: nn.Module = RELU,
        norm_type: str = "BN",
        res_connection: bool = False,
        largest_head: LargestHead | None = None,
    ) -> None:
        super().__init__()
        check_norm_type(norm_type)
        self.num_channels, self.action_encoding_dim = num_channels, action_encoding_dim
        self.res_connection = res_connection
        size = num_channels - action_encoding_dim

        def layers(size_in: int) -> nn.Sequential:
            sizes = [size_in, size, size]
            return mlp(sizes, norm_type=norm_type, activation=activation, norm_last=True)

        if res_connection:
            self.fc_dynamics_1, self.fc_dynamics_2 = layers(num_channels), layers(size)
        else:
            self.fc_dynamics = layers(num_channels)
        self.lstm = prefix_lstm(size, lstm_hidden_size)
        sizes = [lstm_hidden_size or size, *reward_head_hidden_channels, output_support_size]
        options = HeadOptions(norm_type, activation, last_linear_layer_init_zero, largest_head)
        self.fc_reward_head = head(sizes, options)

    def forward(
        self,
        state_action_encoding: Tensor,  # [B, num_channels]
        reward_hidden_state: tuple[Tensor, Tensor],  # h, c: each [1, B, L]
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """The next latent state [B, D], (h, c), and the value prefix's logits [B, F]."""
        if state_action_encoding.shape[1:] != (self.num_channels,):
            size = self.num_channels - self.action_encoding_dim
            raise ValueError(
                f"latent states with actions must have {size} + {self.action_encoding_dim} = "
                f"{self.num_channels} numbers; got shape {list(state_action_encoding.shape)}"
            )
        if self.res_connection:
            latent = state_action_encoding[:, : -self.action_encoding_dim]
            latent = self.fc_dynamics_1(state_action_encoding) + latent
            features = self.fc_dynamics_2(latent)
        else:
            latent = features = self.fc_dynamics(state_action_encoding)
        output, state = remember(self.lstm, features, reward_hidden_state)
        return latent, state, self.fc_reward_head(output)


class PredictionNetworkMLP(nn.Module):
    """The prediction network: from a latent state to policy and value.

    sigma_type: None for a logit for each action; "conditioned" or "fixed" for continuous actions of
        `action_space_size` numbers, see `GaussianHead`.
    gaussian_head: layers of that Gaussian head, see `policy_head`.
    largest_head: of heads that can change their form, see `head`.

    >>> policy, value = PredictionNetworkMLP(3, latent_state_dim=8)(torch.zeros(2, 8))
    >>> policy.shape, value.shape
    (torch.Size([2, 3]), torch.Size([2, 601]))
    """

    def __init__(
        self,
        action_space_size: int,
        latent_state_dim: int = 256,
        value_head_hidden_channels: Sequence[int] = (32,),
        policy_head_hidden_channels: Sequence[int] = (32,),
        output_support_size: int = 601,
        last_linear_layer_init_zero: bool = True,
        activation: nn.Module = RELU,
        norm_type: str = "BN",
        sigma_type: str | None = None,
        fixed_sigma_value: float = 0.3,
        largest_head: LargestHead | None = None,
        gaussian_head: str = "mlp",
    ) -> None:
        super().__init__()
        check_norm_type(norm_type)
        self.latent_state_dim = latent_state_dim
        size = latent_state_dim
        self.fc_prediction_common = mlp(
            [size, size, size], norm_type=norm_type, activation=activation, norm_last=True
        )
        options = HeadOptions(norm_type, activation, last_linear_layer_init_zero, largest_head)
        sizes = [size, *value_head_hidden_channels, output_support_size]
        self.fc_value_head = head(sizes, options)
        sizes = [size, *policy_head_hidden_channels, action_space_size]
        self.fc_policy_head = policy_head(
            sizes, options, sigma_type, fixed_sigma_value, gaussian_head
        )

    def forward(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        """latent_state: [B, D] -> policy [B, A], value logits [B, F]."""
        if latent_state.shape[1:] != (self.latent_state_dim,):
            raise ValueError(
                f"latent states must have shape [B, {self.latent_state_dim}]; got "
                f"{list(latent_state.shape)}"
            )
        x = self.fc_prediction_common(latent_state)
        return self.fc_policy_head(x), self.fc_value_head(x)


class EfficientZeroModelMLP(LatentModel):
    """EfficientZero's model for vectors.

    observation_shape: how many numbers, D or (D,).
    action_space_size: how many actions; of continuous ones, how many numbers each has.
    lstm_hidden_size: width of the value prefix's LSTM; 0 for MuZero's model, which has none.
    reward_support_range, value_support_range: (start, stop, step), stop left out; they may differ.
    proj_hid, proj_out, pred_hid, pred_out: widths of the projection and of its prediction head,
        which are built if `self_supervised_learning_loss`.
    categorical_distribution: False gives one number instead of logits over a support.
    activation: for all networks; None for GELU in the representation and ReLU elsewhere.
    last_linear_layer_init_zero: policy, value and value prefix start at zero.
    state_norm: latent states are brought to 0 .. 1.
    norm_type: "BN" or "LN".
    projection_norm_type: of the projection and its head; None for that of the rest. Without "BN"
        there, all states may become equal to the consistency loss.
    discrete_action_encoding_type: "one_hot", or "not_one_hot" for the one number action / size.
    res_connection_in_dynamics: see `DynamicsNetworkMLP`.
    latent_norm: see `RepresentationNetworkMLP`.
    continuous_action_space: actions are floats [B, D], and the policy a Gaussian, see
        `GaussianHead` (also for `sigma_type` and `fixed_sigma_value`) and `policy_head` (for
        `gaussian_head`).
    largest_head: of heads whose form can change, `LargestHead(num_layers, num_nodes)`; None for
        plain ones.

    >>> model = EfficientZeroModelMLP(4, 2, latent_state_dim=128, lstm_hidden_size=128)
    >>> root = model.initial_inference(torch.zeros(3, 4))
    >>> action = torch.tensor([0, 1, 1])
    >>> child = model.recurrent_inference(root.latent_state, root.reward_hidden_state, action)
    >>> model.decode_reward(child.value_prefix).shape, child.policy_logits.shape
    (torch.Size([3]), torch.Size([3, 2]))
    """

    def __init__(
        self,
        observation_shape: int | Sequence[int] = 2,
        action_space_size: int = 6,
        lstm_hidden_size: int = 512,
        latent_state_dim: int = 256,
        reward_head_hidden_channels: Sequence[int] = (32,),
        value_head_hidden_channels: Sequence[int] = (32,),
        policy_head_hidden_channels: Sequence[int] = (32,),
        reward_support_range: Sequence[float] = (-300.0, 301.0, 1.0),
        value_support_range: Sequence[float] = (-300.0, 301.0, 1.0),
        proj_hid: int = 1024,
        proj_out: int = 1024,
        pred_hid: int = 512,
        pred_out: int = 1024,
        self_supervised_learning_loss: bool = True,
        categorical_distribution: bool = True,
        activation: nn.Module | None = None,
        last_linear_layer_init_zero: bool = True,
        state_norm: bool = False,
        discrete_action_encoding_type: str = "one_hot",
        norm_type: str = "BN",
        res_connection_in_dynamics: bool = False,
        latent_norm: str = "LN",
        continuous_action_space: bool = False,
        sigma_type: str = "conditioned",
        fixed_sigma_value: float = 0.3,
        projection_norm_type: str | None = None,
        largest_head: LargestHead | None = None,
        gaussian_head: str = "mlp",
    ) -> None:
        others = RELU if activation is None else activation
        actions = action_encoding(
            action_space_size, continuous_action_space, discrete_action_encoding_type
        )
        check_gaussian(sigma_type, fixed_sigma_value, gaussian_head)
        reward_support, value_support = supports(
            reward_support_range, value_support_range, categorical_distribution
        )
        super().__init__(
            representation_network=RepresentationNetworkMLP(
                _vector_size(observation_shape),
                latent_state_dim,
                GELU if activation is None else activation,
                norm_type,
                latent_norm,
            ),
            dynamics_network=DynamicsNetworkMLP(
                latent_state_dim + actions.dim,
                actions.dim,
                reward_head_hidden_channels,
                reward_support.size if reward_support else 1,
                lstm_hidden_size,
                last_linear_layer_init_zero,
                others,
                norm_type,
                res_connection_in_dynamics,
                largest_head,
            ),
            prediction_network=PredictionNetworkMLP(
                action_space_size,
                latent_state_dim,
                value_head_hidden_channels,
                policy_head_hidden_channels,
                value_support.size if value_support else 1,
                last_linear_layer_init_zero,
                others,
                norm_type,
                sigma_type if continuous_action_space else None,
                fixed_sigma_value,
                largest_head,
                gaussian_head,
            ),
            action_encoding=actions,
            latent_shape=(latent_state_dim,),
            lstm_hidden_size=lstm_hidden_size,
            reward_support=reward_support,
            value_support=value_support,
            state_norm=state_norm,
            sizes_of_projection=(
                (proj_hid, proj_out, pred_hid, pred_out) if self_supervised_learning_loss else None
            ),
            activation=others,
            projection_norm_type=projection_norm_type or norm_type,
        )


def _vector_size(observation_shape: int | Sequence[int]) -> int:
    shape = [observation_shape] if isinstance(observation_shape, int) else list(observation_shape)
    if len(shape) != 1:
        raise ValueError(
            f"observation_shape={shape} is not the shape of a vector; for images (C, H, W) use "
            "EfficientZeroModel"
        )
    return shape[0]
