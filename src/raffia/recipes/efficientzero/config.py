"""Settings of a run. Imports no torch: help comes at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from raffia.algorithms.efficientzero.config import EfficientZeroConfig, hyper_numbers
from raffia.envs.checked import (
    Checked,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_alone,
    check_divisible,
    named_pair,
    short_repr,
)
from raffia.envs.config import EnvConfig
from raffia.hints import check_range
from raffia.recipes.population_config import RENAMED, PopulationConfig
from raffia.recipes.scale_config import (
    ActorsConfig,
    EngineConfig,
    EvaluatorsConfig,
    LearnersConfig,
    ReanalyzersConfig,
    check_workers,
)

WHERE = ("num", "device", "cpus", "gpus")  # of workers
# Settings that a resumed run may have other values of, or whose names begin so; all others shaped
# what was learnt.
MAY_CHANGE = (
    "collect.num_env_steps",
    "collect.extra_updates",
    "evaluate.",
    "checkpoint.",
    "device",
    "num_threads",
    "compile",
    "env.num_workers",
    "env.step_timeout_seconds",
    "engine.",
    *(f"actors.{name}" for name in WHERE),
    *(f"reanalyzers.{name}" for name in WHERE),
    "evaluators.",
    "learners.",
    "population.workers",
)


@dataclass(frozen=True, kw_only=True)
class RecordedDataConfig(Checked):
    """Recorded episodes, which fill the replay before the first update."""

    # Files and folders of episodes, or ids of Minari data sets: whatever
    # `raffia.data.read_episodes` reads.
    files: tuple[str, ...] = ()
    # Names in the files that differ from the expected ones, as NAME=MEANING: state=obs;
    # infos/mask=action_mask for nested entries; infos= leaves an entry out.
    columns: tuple[Annotated[str, named_pair("state=obs")], ...] = ()
    # Take missing rewards as 0, but for JSON lines, where rewards tell what a line is; and episodes
    # without an end as truncated.
    complete: bool = False
    # Learn from the files alone, with this many updates, and play evaluations only; 0: continue to
    # collect.
    num_updates: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_updates and not self.files:
            raise ValueError(
                f"data.num_updates={self.num_updates} learns from recorded episodes alone, but "
                "data.files names none: set data.files, or leave data.num_updates out"
            )
        if (self.columns or self.complete) and not self.files:
            raise ValueError(
                f"{short_repr(self)} describes files of episodes, and data.files names none: give "
                "them, or leave these settings out"
            )


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Checked):
    """The replay buffer and its draws."""

    capacity: PositiveInt = 100_000  # number of steps that the buffer holds
    batch_size: PositiveInt = 256  # segments in a batch
    alpha: NonNegativeFloat = 0.6  # exponent of priorities; 0: all steps are equally likely
    beta: Fraction = 0.4  # importance exponent at the start; it rises to 1 over the run
    on_disk: bool = False  # store steps in files of the run folder, if memory cannot hold them
    # Parts of the replay, each of some of the environments, from which batches are drawn in equal
    # numbers; changes the run unless 1. Reanalyzers then hold the frames of their shards.
    shards: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divisible("replay.batch_size", self.batch_size, "replay.shards", self.shards)


@dataclass(frozen=True, kw_only=True)
class CollectConfig(Checked):
    """The numbers of steps and updates."""

    num_env_steps: PositiveInt = 100_000  # steps of all environments together
    random_env_steps: NonNegativeInt = 2_000  # steps with random actions before the first update
    updates_per_env_step: PositiveFloat = 1.0  # updates for each environment step
    # Updates after the last step (or data.num_updates), without new data.
    extra_updates: NonNegativeInt = 0
    rollout_length: PositiveInt = 1  # steps of each environment between updates


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Checked):
    """Evaluations: whole episodes without noise."""

    every_env_steps: PositiveInt = 10_000  # environment steps between evaluations
    # Updates between evaluations of runs that do not play, see data.num_updates.
    every_updates: PositiveInt = 1_000
    num_episodes: PositiveInt = 16  # episodes of an evaluation
    num_simulations: NonNegativeInt = 0  # simulations of each search; 0: as many as when acting
    max_steps: PositiveInt = 27_000  # maximal length of an episode
    target_return: float | None = None  # mean return at which the run ends
    opponent: Literal["random", "rule", "perfect"] = "perfect"  # opponent in two-player games
    record: Literal["none", "gif", "mp4"] = "none"  # film of each evaluation (extra: video)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """Checkpoints for a resume."""

    every_updates: PositiveInt = 1_000  # updates between checkpoints
    keep: PositiveInt = 3  # number of newest checkpoints to keep, besides the best one


@dataclass(frozen=True, kw_only=True)
class EfficientZeroRun(EfficientZeroConfig):
    """A whole run of EfficientZero.

    >>> run = EfficientZeroRun(seed=3, env=EnvConfig(id="atari/breakout", frame_stack=4))
    >>> run.num_updates
    98000
    """

    # Since earlier versions.
    RENAMED: ClassVar[Mapping[tuple[str, str], str]] = {
        **RENAMED,
        ("collect", "steps_per_turn"): "rollout_length",
        ("targets", "reanalyse_ratio"): "reanalyze_ratio",
        ("targets", "reanalyse_noise"): "reanalyze_noise",
        ("targets", "horizon_share"): "horizon_fraction",
        ("optimizer", "warmup_share"): "warmup_fraction",
    }

    seed: int = 0  # seed of all randomness of the run
    device: str = "cpu"  # device of networks and gradients, such as cuda or cuda:1
    # Threads of torch and search; more pay for large networks on idle cores.
    num_threads: PositiveInt = 1
    # Initial weights: the folder of another run, whose best checkpoint is used, or a checkpoint of
    # LightZero (.pth.tar); empty: random weights. A resumed run continues with its own.
    init_from: str = ""

    # Your own networks as file.py:name or module:name, of a function that returns the model; empty:
    # those that model.* describes.
    networks: str = ""

    env: EnvConfig = field(default_factory=EnvConfig)
    data: RecordedDataConfig = field(default_factory=RecordedDataConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    reanalyzers: ReanalyzersConfig = field(default_factory=ReanalyzersConfig)
    evaluators: EvaluatorsConfig = field(default_factory=EvaluatorsConfig)
    learners: LearnersConfig = field(default_factory=LearnersConfig)
    compile: bool = False  # use torch.compile for the gradients; pays on a GPU
    cudagraphs: bool = False  # record gradients and the networks of searches as CUDA graphs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_threads", self.num_threads, 1, 1024)  # torch dies of too many
        if not self.num_updates:
            raise ValueError(
                f"num_env_steps={self.collect.num_env_steps} leaves no steps to learn from, "
                f"because the first random_env_steps={self.collect.random_env_steps} are played "
                "at random: raise num_env_steps, or lower random_env_steps"
            )

        self._check_data()
        self.population.check(
            compile=self.compile,
            evolvable=self.model.evolvable_heads,
            numbers=hyper_numbers(self),
        )
        self._check_shards()
        self._check_learners()
        self._check_cudagraphs()
        self._check_precision()
        for parts, num in (
            ("actors.num", max(1, self.actors.num)),
            ("replay.shards", self.replay.shards),
            ("population.size", self.population.size),
        ):
            check_divisible("env.num_envs", self.env.num_envs, parts, num, of="environments")
        check_workers(self, ("actors", "reanalyzers", "evaluators"))

    def _check_data(self) -> None:
        if not self.data.files:
            return
        check_alone(
            "data.files",
            "recorded episodes have no root values of searches",
            {"targets.bootstrap=search": self.targets.bootstrap == "search"},
        )
        if not self.is_offline:
            return
        if self.targets.reanalyze_ratio < 1:
            raise ValueError(
                f"targets.reanalyze_ratio={self.targets.reanalyze_ratio} cannot be combined with "
                f"data.num_updates={self.data.num_updates}: if nothing is played, all targets of "
                "the policy must come from reanalyze: set targets.reanalyze_ratio=1.0"
            )
        check_alone(
            f"data.num_updates={self.data.num_updates}",
            "such a run learns from files alone and plays nothing",
            {"actors.*": self.actors.play_elsewhere},
        )

    def _check_shards(self) -> None:
        size, num = self.replay.shards, self.reanalyzers.num
        if size > 1 and self.population.size > 1:
            raise ValueError(
                f"replay.shards={size} cannot be combined with "
                f"population.size={self.population.size}: members share one replay or have their "
                "own (population.replay=own). Leave replay.shards out"
            )
        if self.shards_elsewhere and num % size and size % num:
            raise ValueError(
                f"replay.shards={size} cannot be divided equally among reanalyzers.num={num}: set "
                f"reanalyzers.num={size}, or a number that divides it or is divided by it"
            )

    def _check_learners(self) -> None:
        num = self.learners.num
        if num == 1:
            return
        check_divisible("replay.batch_size", self.replay.batch_size, "learners.num", num)
        check_alone(
            f"learners.num={num}",
            "its processes share the batches of one agent, and each holds its whole state",
            {
                f"population.size={self.population.size}": self.population.size > 1,
                "learners.state=sharded": self.learners.state == "sharded",
            },
        )

    def _check_cudagraphs(self) -> None:
        if not self.cudagraphs:
            return
        if not self.device.startswith("cuda"):
            raise ValueError(
                f"cudagraphs=True needs a GPU, but device={self.device}: set device=cuda, or "
                "leave cudagraphs out"
            )
        check_alone(
            "cudagraphs=True",
            "it records gradients of fixed shape",
            {
                "compile=True": self.compile,
                f"population.workers={self.population.workers}": self.population.workers > 0,
                "a range of batch_size": self.population.changes_batch_size,
                "model.evolvable_heads=True": self.model.evolvable_heads,
            },
        )

    def _check_precision(self) -> None:
        if self.precision != "float32":
            check_alone(
                f"precision={self.precision}",
                "it is for the networks of a single agent",
                {f"population.size={self.population.size}": self.population.size > 1},
            )

    def __repr__(self) -> str:
        return short_repr(self)

    def on(self, device: str) -> EfficientZeroRun:
        """The run's config for a worker on this device; "" stands for the device of the run.

        >>> EfficientZeroRun(device="cuda", cudagraphs=True).on("cpu").cudagraphs
        False
        """
        device = device or self.device
        cudagraphs = self.cudagraphs and device.startswith("cuda")
        return replace(self, device=device, cudagraphs=cudagraphs)

    @property
    def is_offline(self) -> bool:
        """Whether it learns from recorded episodes alone."""
        return self.data.num_updates > 0

    @property
    def shards_elsewhere(self) -> bool:
        """Whether reanalyzers hold the replay's shards."""
        return self.replay.shards > 1 and self.reanalyzers.num > 0

    @property
    def title(self) -> str:
        """The task of a run, without the seed."""
        return f"EfficientZero on {self.env.name}"

    @property
    def num_updates(self) -> int:
        """The number of updates of the whole run."""
        played = self.collect.num_env_steps - self.collect.random_env_steps
        of_steps = max(0, round(played * self.collect.updates_per_env_step))
        return (self.data.num_updates or of_steps) + self.collect.extra_updates
