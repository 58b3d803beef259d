"""Any environment of Gymnasium as an Env."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from torch import Tensor

from raffia.envs.env import Box, Discrete, Env, EnvSpec
from raffia.envs.rows import EnvRows
from raffia.files import shown
from raffia.functional.seeds import derive_seed
from raffia.tensordict.tensordict import TensorDict

Array = npt.NDArray[Any]
GymSpace = spaces.Space[Any]
_NUMBERS = {float, int, bool, np.float64, np.float32, np.bool_}
_EXTRAS = {"box2d": "box2d", "classic_control": "video"}  # rooms of Gymnasium that need packages


class GymEnv:
    """One environment of Gymnasium, by its id or as an object that is made already.

    Observations: a Box of one axis is a float32 vector; one of three axes is a picture and comes as
    [C, H, W] in its own dtype (the shorter one of first and last axis is the channels), a uint8 one
    of two axes as [1, H, W]; a Discrete is one-hot; other Boxes of two axes (a row for each thing
    that it shows), Dict, Tuple, MultiBinary and MultiDiscrete are flattened to one float32 vector,
    as `gymnasium.spaces.flatten` does.
    Actions: Discrete counts from 0, whatever its start; a Box is flat, with finite bounds, and one
    of whole numbers gets the nearest of them.

    >>> env = GymEnv("CartPole-v1")
    >>> env.spec.observation_shape, env.spec.action
    ((4,), Discrete(n=2))
    >>> env.reset(seed=3)["observation"]
    tensor([-0.0414, -0.0263,  0.0301,  0.0082])
    >>> after = env.step(torch.tensor(1))
    >>> after["reward"], after["terminated"], after["truncated"]
    (tensor(1.), tensor(False), tensor(False))
    """

    def __init__(
        self,
        env: str | gymnasium.Env[Any, Any],
        *,
        max_episode_steps: int = 0,
        render: bool = False,
        masked: bool | None = None,
    ) -> None:
        """`max_episode_steps` replaces the limit of the id (0: keep it); `render=True` makes the
        pictures that `render()` gives, and costs time. Both are for ids: an object has its own.
        `masked=True` reads the legal actions from `info["action_mask"]`. False does not; None
        does not either, and warns once where there are some."""
        if isinstance(env, str):
            env = made(env, max_episode_steps, render)
        elif max_episode_steps or render:
            raise ValueError(
                "max_episode_steps and render can only be given with an id: wrap the object in "
                "gymnasium.wrappers.TimeLimit, and make it with render_mode='rgb_array'"
            )
        is_vector = hasattr(env, "single_action_space")
        if isinstance(env, type) or is_vector or not hasattr(env, "action_space"):
            raise TypeError(
                f"GymEnv(env) needs one environment of Gymnasium, or its id, not {shown(env)}; a "
                "batch has one for each row: SerialBatch([GymEnv(env), ...])"
            )
        self.gym = env
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        shape, dtype, self._read = observation_reader(env.observation_space, name)
        action, self._act = action_writer(env.action_space, name)
        self.spec = EnvSpec(
            observation_shape=shape,
            observation_dtype=dtype,
            action=action,
            name=name,
            masked=bool(masked),
        )
        self._warns_of_masks = masked is None
        self._row = EnvRows.for_spec(self.spec, 1)

    def reset(self, seed: int) -> TensorDict:
        """Start the episode of this seed and return its first state [].

        Seeds below 2**31 are Gymnasium's own; greater ones, which some environments refuse, are
        hashed to one of them.
        """
        self.reset_row(seed, self._row, 0)
        return self._outputs(self.spec.state_keys)

    def step(self, action: Tensor) -> TensorDict:
        """Act: the state after it, with reward, terminated and truncated, []."""
        value = action.item() if isinstance(self.spec.action, Discrete) else action.numpy()
        self.step_row(value, self._row, 0)
        return self._outputs(self.spec.step_keys)

    def reset_row(self, seed: int, rows: EnvRows, row: int) -> None:
        """Like `reset`, but write the state into a row of arrays."""
        small = seed if seed < 2**31 else derive_seed(seed, "gymnasium") % 2**31
        result = self.gym.reset(seed=small)
        if len(result) != 2:
            raise self._odd("reset", "an observation and an info", len(result))
        observation, info = result
        rows.observation[row] = self._read(observation)
        self._read_mask(info, rows, row)

    def step_row(self, action: Any, rows: EnvRows, row: int) -> None:
        """Like `step`, but write the outputs into a row of arrays.

        Where the task has ended at the limit of time it has ended: that is not `truncated`.
        """
        result = self.gym.step(self._act(action))
        if len(result) != 5:
            raise self._odd("step", "observation, reward, terminated, truncated, info", len(result))
        observation, reward, terminated, truncated, info = result
        rows.observation[row] = self._read(observation)
        self._read_mask(info, rows, row)
        if not {type(reward), type(terminated), type(truncated)} <= _NUMBERS:
            self._require_numbers(reward=reward, terminated=terminated, truncated=truncated)
        rows.reward[row] = reward
        rows.terminated[row] = terminated
        rows.truncated[row] = truncated and not terminated

    def render(self) -> Tensor | None:
        """A picture of the current state, uint8 [H, W, 3]; None unless pictures were requested.

        >>> GymEnv("CartPole-v1").render() is None
        True
        """
        if self.gym.render_mode != "rgb_array":
            return None
        try:
            picture = self.gym.render()
        except DependencyNotInstalled as error:
            raise ImportError(
                f"pictures of {self.spec.name} need a package that is not installed: "
                f"{_to_install(self.spec.name, error)}"
            ) from error
        return torch.from_numpy(np.array(picture, dtype=np.uint8))

    def close(self) -> None:
        """Close the environment of Gymnasium."""
        self.gym.close()

    def _read_mask(self, info: Mapping[str, Any], rows: EnvRows, row: int) -> None:
        if rows.action_mask is None and not self._warns_of_masks:
            return
        if not isinstance(info, Mapping):
            raise ValueError(
                f"{self.spec.name} returned info={info!r}, but Gymnasium's reset and step return "
                "a dict; an empty one, {}, will do"
            )
        if rows.action_mask is None:
            if "action_mask" in info:
                self._warns_of_masks = False
                warnings.warn(_unread_mask(self.spec.name), stacklevel=4)
            return
        if "action_mask" not in info:
            raise ValueError(
                f'{self.spec.name} returned an info without "action_mask", which masked=True reads '
                "at each reset and step"
            )
        found = np.asarray(info["action_mask"], bool)
        if found.shape != rows.action_mask[row].shape:
            raise ValueError(
                f'{self.spec.name} returned info["action_mask"] of shape {list(found.shape)}, but '
                f"masked=True needs {list(rows.action_mask[row].shape)}, one mark for each action"
            )
        rows.action_mask[row] = found

    def _require_numbers(self, **outcome: Any) -> None:
        """Refuse what numpy would take as a number: None, which is NaN or False, or a text."""
        for key, value in outcome.items():
            array = np.asarray(value)
            if array.shape or array.dtype.kind not in "biuf":
                raise ValueError(
                    f"{self.spec.name} returned {key}={value!r}, but it must be one number; an "
                    "array of one has it as array.item()"
                )

    def _odd(self, method: str, wanted: str, num: int) -> ValueError:
        """The error about an environment of another interface, such as gym's before Gymnasium."""
        return ValueError(
            f"{method} of {self.spec.name} returned {num} values, but Gymnasium's returns "
            f"{wanted}. The package shimmy, or a few lines of your own, adapt an environment of "
            "the old gym"
        )

    def _outputs(self, keys: tuple[str, ...]) -> TensorDict:
        return TensorDict(
            {key: tensor[0].clone() for key, tensor in self._row.tensors(keys).items()},
            batch_size=[],
        )


def as_env(make: Callable[[], Any]) -> Env:
    """The environment that `make` returns, as an Env: one of Gymnasium is wrapped.

    >>> as_env(lambda: gymnasium.make("CartPole-v1")).spec.name
    'CartPole-v1'
    """
    one = make()
    return GymEnv(one) if isinstance(one, gymnasium.Env) else one


def made(name: str, max_episode_steps: int = 0, render: bool = False) -> gymnasium.Env[Any, Any]:
    """An environment of Gymnasium by its id, without the checker that doubles the time of a step.

    >>> made("CartPole-v1", max_episode_steps=200).spec.max_episode_steps
    200
    """
    options: dict[str, Any] = {}  # an environment need not take render_mode
    if render:
        _draw_without_a_display()
        options["render_mode"] = "rgb_array"
    try:
        with warnings.catch_warnings():  # of packages that environments import, not of environments
            warnings.filterwarnings(
                "ignore", "builtin type .* has no __module__", DeprecationWarning
            )
            warnings.filterwarnings("ignore", "pkg_resources is deprecated")
            return gymnasium.make(
                name,
                max_episode_steps=max_episode_steps or None,
                disable_env_checker=True,
                **options,
            )
    except DependencyNotInstalled as error:
        raise ImportError(
            f"{name} needs a package that is not installed: {_to_install(name, error)}"
        ) from error
    except TypeError as error:
        if render and "render_mode" in str(error):
            raise TypeError(
                f"pictures of {name} need a render_mode, which what makes it does not take: give "
                "its class `def __init__(self, render_mode=None)` and self.render_mode"
            ) from error
        raise


def _to_install(name: str, error: Exception) -> str:
    """The extra of ours that brings what an environment lacks, or Gymnasium's text about it."""
    kind = gymnasium.registry[name].entry_point if name in gymnasium.registry else ""
    for package, extra in _EXTRAS.items():
        if f"envs.{package}" in str(kind):
            return f"pip install 'raffia[{extra}]'"
    return str(error)


def _draw_without_a_display() -> None:
    """Pictures are drawn in memory; SDL complains of a display that is not there all the same."""
    if sys.platform == "linux" and not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def gym_names() -> list[str]:
    """The ids that Gymnasium knows, the newest version of each.

    >>> "CartPole-v1" in gym_names(), "CartPole-v0" in gym_names()
    (True, False)
    """
    newest: dict[tuple[str | None, str], int | None] = {}
    for spec in gymnasium.registry.values():
        newest[spec.namespace, spec.name] = max(
            spec.version,
            newest.get((spec.namespace, spec.name)),
            key=lambda v: -1 if v is None else v,
        )
    return sorted(
        spec.id
        for spec in gymnasium.registry.values()
        if newest[spec.namespace, spec.name] == spec.version
    )


def known_to_gymnasium(name: str) -> bool:
    """Whether Gymnasium knows an id; `module:id` once the module is imported, which registers it.

    >>> known_to_gymnasium("CartPole-v1"), known_to_gymnasium("Cartpole")
    (True, False)
    """
    return name.rpartition(":")[2] in gymnasium.registry


def observation_reader(
    space: GymSpace, name: str
) -> tuple[tuple[int, ...], torch.dtype, Callable[[Any], Any]]:
    """The reading of an observation as one tensor: its shape, its dtype, and the function.

    >>> shape, dtype, read = observation_reader(spaces.Discrete(3, start=1), "mine")
    >>> shape, read(2)
    ((3,), array([0, 1, 0]))
    """
    match space:
        case spaces.Box(shape=(_,)):
            return space.shape, torch.float32, _of_shape(space, name, _as_it_is)
        case spaces.Box(shape=(_, _), dtype=np.uint8):  # numpy broadcasts [H, W] to [1, H, W]
            return (1, *space.shape), torch.uint8, _of_shape(space, name, _as_it_is)
        case spaces.Box(shape=(_, _)):
            return (spaces.flatdim(space),), torch.float32, _of_shape(space, name, np.ravel)
        case spaces.Box(shape=(first, height, last)):
            dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
            if last <= first:
                to_first = functools.partial(np.moveaxis, source=-1, destination=0)
                return (last, first, height), dtype, _of_shape(space, name, to_first)
            return space.shape, dtype, _of_shape(space, name, _as_it_is)
    flat = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
    if not all(isinstance(part, flat) for part in parts(space)):
        raise ValueError(
            f"{name} has the observations {space}, which cannot be flattened to a vector of fixed "
            "size; wrap it in gymnasium.wrappers.TransformObservation first"
        )
    if any(len(part.shape or ()) > 1 for part in parts(space)):
        raise ValueError(
            f"{name} has the observations {space}: pictures must be the only part, and have three "
            "axes, since frame_stack stacks them; choose one with "
            "gymnasium.wrappers.FilterObservation or TransformObservation first"
        )
    return (
        (spaces.flatdim(space),),
        torch.float32,
        lambda observation: spaces.flatten(space, _in_space(space, observation, name)),
    )


def observation_bounds(env: GymEnv) -> tuple[Tensor, Tensor] | None:
    """The least and greatest numbers of an observation; None where its space is no Box.

    >>> float(observation_bounds(GymEnv("MountainCar-v0"))[1][0])  # the position
    0.6000000238418579
    """
    space = env.gym.observation_space
    if not isinstance(space, spaces.Box):
        return None
    _, dtype, read = observation_reader(space, env.spec.name)
    low, high = (torch.as_tensor(read(bound)).to(dtype) for bound in (space.low, space.high))
    return low, high


def _of_shape(space: spaces.Box, name: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The reading of a Box that refuses another shape, which numpy would repeat to fill the row,
    and numbers that bytes can't hold.
    """
    shape, in_bytes = space.shape, space.dtype == np.uint8 and len(space.shape) > 1

    def checked(observation: Any) -> Any:
        if getattr(observation, "shape", None) != shape:
            _in_space(space, observation, name)
        if in_bytes and getattr(observation, "dtype", None) != np.uint8:
            array = np.asarray(observation)
            with np.errstate(invalid="ignore"):
                lost = array.astype(np.uint8) != array
            if lost.any():
                raise ValueError(
                    f"{name} returned a picture with {array[lost][0]}, but its observation_space "
                    f"is {space}: return whole numbers 0 .. 255, or declare a Box of float32"
                )
        return read(observation)

    return checked


def _in_space(space: GymSpace, value: Any, name: str) -> Any:
    """The value, if it has the shape of a Box or is one of the other spaces' values: flattened, a
    number below a Discrete's would count from its end.
    """
    inner: Iterable[tuple[Any, GymSpace]] = ()
    match space:
        case spaces.Dict():
            inner, inside = space.items(), isinstance(value, Mapping) and {*value} >= {*space}
        case spaces.Tuple():
            inner, inside = enumerate(space), len(value) == len(space)
        case spaces.Box():
            inside = np.shape(value) == space.shape
        case _:
            inside = space.contains(value)
    if not inside:
        is_box = isinstance(space, spaces.Box)
        found = f"of shape {list(np.shape(value))}" if is_box else shown(value)
        raise ValueError(
            f"{name} returned an observation {found}, which is not in its space {space}: make both "
            "agree, in the environment or by gymnasium.wrappers.TransformObservation"
        )
    for key, part in inner:
        _in_space(part, value[key], name)
    return value


def action_writer(space: GymSpace, name: str) -> tuple[Discrete | Box, Callable[[Any], Any]]:
    """The actions of an environment, and the function that converts one to its form.

    >>> kind, write = action_writer(spaces.Discrete(3, start=-1), "mine")
    >>> kind, write(0)
    (Discrete(n=3), -1)
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return Discrete(int(space.n)), (_as_it_is if start == 0 else lambda action: action + start)
    if isinstance(space, spaces.Box):
        low, high, shape, dtype = space.low, space.high, space.shape, space.dtype
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(
                f"{name} has the actions {space}, whose bounds must be finite: gymnasium.wrappers."
                "TransformAction(env, lambda action: action, gymnasium.spaces.Box(-1, 1, "
                f"{space.shape})) sets them; ClipAction, which takes them away, is not needed"
            )
        kind = Box(tuple(low.ravel().tolist()), tuple(high.ravel().tolist()))
        nearest = np.rint if np.issubdtype(dtype, np.integer) else _as_it_is
        # clipped: float32 of float64 bounds may lie a rounding outside
        return kind, lambda action: nearest(np.clip(action.reshape(shape), low, high)).astype(dtype)
    raise ValueError(
        f"{name} has the actions {space}, but only Discrete and Box are supported. "
        "gymnasium.wrappers.TransformAction makes a MultiDiscrete or MultiBinary space Discrete, "
        "with one number for each combination"
    )


def parts(space: GymSpace) -> list[GymSpace]:
    """The spaces that a Dict or Tuple is made of, at any depth; of others, the space itself.

    >>> len(parts(spaces.Tuple([spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(3))])))
    2
    """
    match space:
        case spaces.Dict():
            return [leaf for inner in space.values() for leaf in parts(inner)]
        case spaces.Tuple():
            return [leaf for inner in space for leaf in parts(inner)]
    return [space]


def _as_it_is(value: Any) -> Any:
    return value


def _unread_mask(name: str) -> str:
    return (
        f'{name} marks its legal actions in info["action_mask"], but these marks are not read: '
        "GymEnv(env, masked=True) reads them, masked=False ignores them without this warning"
    )
