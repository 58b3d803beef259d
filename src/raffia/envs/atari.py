"""Games of the Atari 2600 through the Arcade Learning Environment, with the standard preprocessing.

A step repeats its action for `frame_skip` frames of the emulator and shows the newest of them: the
maximum of the last two, since many games draw some objects in every other frame only (with a
`frame_skip` of 1 the one frame as it is), made smaller by means of areas. Stacks of frames are left
to who collects. Games start as the emulator does, then up to `noop_max` idle frames follow. Then,
and after each lost life, FIRE is pressed for the agent for as long as a step is, where it is among
the game's actions (`press_fire`): some games wait for it, and an agent that does what it thinks is
best may never press it, so that an episode lasts as long as it may.

Lives. In training a lost life is reported as `terminated`, so that it counts as an end when values
are learnt, and as `continues`, since the game continues: the observation of this step is the first
one of the next life, and the next `step` acts in it. What belongs to a seed is the whole game with
all its lives, as a life depends on all that was done in those before it; so a game is made of its
seed and its actions alone, and a resume plays the actions since the last `reset` again, over the
ends of lives. `reset` begins the game of its seed at any time. With the same actions the game is
frame by frame the same in training and in evaluation.

Sources: Mnih et al. (2015), "Human-level control through deep reinforcement learning"; Machado et
al. (2018), "Revisiting the Arcade Learning Environment" (sticky actions).
"""

from __future__ import annotations

import importlib.util
import pathlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raffia.envs.config import AtariConfig
from raffia.envs.env import Discrete, EnvSpec
from raffia.envs.resize import area
from raffia.functional.seeds import derive_seed, generator_for
from raffia.hints import did_you_mean
from raffia.tensordict.tensordict import TensorDict

if TYPE_CHECKING:
    from ale_py import ALEInterface


FOR_TWO = ("combat", "joust", "maze_craze", "warlords")  # nobody can play these alone


class AtariEnv:
    """One Atari game as an `Env`.

    game: "ms_pacman", "MsPacman" or "ALE/MsPacman-v5"; of the last one only the name is taken, not
        what Gymnasium means by v5.
    evaluation: whole games with their true rewards, up to `evaluation_frames`.
    full_action_space: all 18 actions of the console, instead of those that have an effect.

    >>> env = AtariEnv("breakout", AtariConfig(size=64, colour=False))
    >>> env.spec.observation_shape, env.spec.action, env.action_names
    ((1, 64, 64), Discrete(n=4), ('NOOP', 'FIRE', 'RIGHT', 'LEFT'))
    >>> state = env.reset(seed=3)
    >>> after = env.step(torch.tensor(1))
    >>> after["reward"], after["terminated"], after["truncated"], after["continues"]
    (tensor(0.), tensor(False), tensor(False), tensor(False))
    >>> env.render().shape
    torch.Size([210, 160, 3])
    """

    def __init__(
        self,
        game: str,
        config: AtariConfig | None = None,
        *,
        evaluation: bool = False,
        full_action_space: bool = False,
    ) -> None:
        self.config = config = AtariConfig() if config is None else config
        self.max_frames = config.evaluation_frames if evaluation else config.max_frames
        self.episodic_life = config.episodic_life and not evaluation
        self.clip_reward = config.clip_reward and not evaluation
        name = game_name(game)
        self._ale = _emulator(name)
        # The state from which every game begins. Loading the cartridge would give it too, but takes
        # 20 times as long; resetting alone leaves traces of the game before, as in Pitfall II.
        self._loaded = self._ale.cloneState(include_rng=True)
        ale = self._ale
        self._actions = ale.getLegalActionSet() if full_action_space else ale.getMinimalActionSet()
        self.action_names = tuple(action.name for action in self._actions)
        self._fire: int | None = None
        if config.press_fire and "FIRE" in self.action_names:
            self._fire = self.action_names.index("FIRE")
        channels = 3 if config.colour else 1
        screen = (*ale.getScreenDims(), 3) if config.colour else ale.getScreenDims()
        self._frames = [np.zeros(screen, np.uint8) for _ in range(2)]  # the last two
        self._runs, self._looks = False, True
        self.spec = EnvSpec(
            observation_shape=(channels, config.size, config.size),
            observation_dtype=torch.uint8,
            action=Discrete(len(self._actions)),
            continues=self.episodic_life,
            name=f"atari/{name}",
        )

    def reset(self, seed: int) -> TensorDict:
        """Start the game of this seed, whatever was played before; return its first state []."""
        self._ale.restoreState(self._loaded)
        self._ale.reset_game()
        self._previous = self._actions[0]  # NOOP
        most = self.config.noop_max
        for _ in range(derive_seed(seed, "noop") % most + 1 if most else 0):
            self._ale.act(self._previous)
        self._sticky = generator_for(seed, "sticky")
        self._num_frames = 0
        self._see(self._frames[1])
        if self._fire is not None:
            self._play(self._fire)
            self._num_frames = 0  # as idle frames, it comes before the first step
        self._lives = self._ale.lives()
        self._runs = True
        both = self._fire is not None and self.config.frame_skip > 1
        return TensorDict(observation=self._shrunk(self._max_frame(both)))

    def step(self, action: Tensor) -> TensorDict:
        """Act: the state after it, with reward, terminated and truncated, []."""
        reward, over, lost, late = self._act(int(action))
        gained = float(np.sign(reward) if self.clip_reward else reward)
        frame = self._max_frame(self.config.frame_skip > 1)
        outputs = TensorDict(
            observation=self._shrunk(frame),
            reward=torch.tensor(gained, dtype=torch.float32, device="cpu"),
            terminated=torch.tensor(over or lost, device="cpu"),
            truncated=torch.tensor(late and not lost, device="cpu"),
        )
        if self.episodic_life:
            outputs["continues"] = torch.tensor(lost and not late, device="cpu")
        return outputs

    def fast_forward(self, seed: int, actions: Tensor) -> None:
        """Play the game of this seed up to after these actions [n], without looking at the screen.

        It takes 0.6 of the time of `step`. The emulator's saved states would be faster, but do not
        hold all that rewards and pictures follow from: see docs/scale.md, "Not built".
        """
        self._looks = False
        try:
            self.reset(seed)
            for number in actions.tolist():
                self._act(number)
        finally:
            self._looks = True

    def _act(self, number: int) -> tuple[int, bool, bool, bool]:
        """Act: the reward, and whether the game is over, a life was lost, it is too late."""
        if not self._runs:
            raise RuntimeError(
                "no game is running: it has ended or was never started; call reset(seed)"
            )
        reward = self._play(number)
        over = self._ale.game_over()
        # Some games continue for a few frames with no life left; then they are over, once.
        lost = 0 < self._ale.lives() < self._lives and not over
        if lost and self._fire is not None and self._num_frames < self.max_frames:
            reward += self._play(self._fire)  # the next life begins
            over = self._ale.game_over()
        late = self._num_frames >= self.max_frames and not over
        lost = lost and self.episodic_life and not over
        self._lives = self._ale.lives()
        self._runs = not (over or late)
        return reward, over, lost, late

    def render(self) -> Tensor:
        """The current screen, uint8 [H, W, 3]: 210 x 160 in most games."""
        return torch.from_numpy(self._ale.getScreenRGB())

    def close(self) -> None:
        """Do nothing: the emulator holds only memory, which is freed with this object."""

    def _play(self, number: int) -> int:
        """Repeat the action; the last two frames are stored. Gives the sum of the rewards."""
        if not 0 <= number < len(self._actions):
            raise ValueError(f"action {number} must be in 0 .. {len(self._actions) - 1}")
        skip, sticky = self.config.frame_skip, self.config.sticky
        stuck = [False] * skip
        if sticky:
            stuck = (torch.rand(skip, generator=self._sticky, device="cpu") < sticky).tolist()
        total = 0
        for frame in range(skip):
            if not stuck[frame]:
                self._previous = self._actions[number]
            total += self._ale.act(self._previous)  # does nothing once the game is over
            if frame >= skip - 2:
                self._see(self._frames[frame - skip])
        self._num_frames += skip
        return total

    def _max_frame(self, both: bool) -> np.ndarray:
        """The last frame, or the maximum of the last two."""
        return np.maximum(*self._frames) if both else self._frames[1]

    def _see(self, frame: np.ndarray) -> None:
        if not self._looks:
            return
        if self.config.colour:
            self._ale.getScreenRGB(frame)
        else:
            self._ale.getScreenGrayscale(frame)

    def _shrunk(self, frame: np.ndarray) -> Tensor:
        picture = torch.from_numpy(frame)
        picture = picture if self.config.colour else picture.unsqueeze(-1)
        return area(picture, self.config.size, self.config.size)


def atari_games() -> list[str]:
    """The single-player games that ale-py includes; none if it is not installed.

    >>> games = atari_games()
    >>> len(games) >= 104, "ms_pacman" in games, "combat" in games
    (True, True, False)
    """
    found = importlib.util.find_spec("ale_py")
    if found is None or not found.submodule_search_locations:
        return []
    cartridges = pathlib.Path(found.submodule_search_locations[0], "roms").glob("*.bin")
    return sorted({cartridge.stem for cartridge in cartridges} - set(FOR_TWO))


def game_name(game: str) -> str:
    """The name that the emulator uses for a game.

    >>> game_name("ALE/MsPacman-v5"), game_name("ms_pacman"), game_name("Pong")
    ('ms_pacman', 'ms_pacman', 'pong')
    >>> game_name("brekout")
    Traceback (most recent call last):
        ...
    ValueError: there is no Atari game 'brekout'. Did you mean 'breakout'? ...
    """
    games = {name.replace("_", ""): name for name in atari_games()}
    if not games:
        raise _not_installed()
    plain = game.removeprefix("ALE/").removesuffix("-v5").replace("_", "").lower()
    if plain in games:
        return games[plain]
    hint = did_you_mean(plain, games, " Did you mean {!r}?")
    raise ValueError(
        f"there is no Atari game {game!r}.{hint} All of them: raffia.envs.atari.atari_games()"
    )


def _emulator(name: str) -> ALEInterface:
    """The emulator with the cartridge in it, and silent."""
    try:
        from ale_py import ALEInterface, LoggerMode, roms
    except ImportError as error:
        raise _not_installed() from error
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    # Sticky actions are drawn here, by the seed of the episode; nothing else in the emulator is
    # random: in none of its games does its own seed change a frame.
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("random_seed", 0)
    cartridge = roms.get_rom_path(name)
    if cartridge is None:
        raise FileNotFoundError(
            f"ale-py's cartridge of {name!r} is missing or altered; "
            "pip install --force-reinstall ale-py"
        )
    ale.loadROM(cartridge)
    return ale


def _not_installed() -> ImportError:
    return ImportError("Atari games need ale-py, which includes them: pip install 'raffia[atari]'")
