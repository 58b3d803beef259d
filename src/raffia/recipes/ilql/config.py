"""Settings of an ILQL run. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar, Literal

from raffia.algorithms.ilql.config import ILQLConfig, hyper_numbers
from raffia.envs.checked import (
    Checked,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
    check_alone,
    named_pair,
    short_repr,
)
from raffia.hints import check_range
from raffia.recipes.efficientzero.config import CheckpointConfig
from raffia.recipes.population_config import RENAMED, PopulationConfig
from raffia.recipes.scale_config import (
    EngineConfig,
    EvaluatorsConfig,
    LearnersConfig,
    check_workers,
)

# Settings that a run may go on with other values of, or whose names begin so; all others shaped
# what was learnt.
MAY_CHANGE = (
    "num_updates",
    "num_micro_batches",
    "learners.",
    "engine.",
    "evaluators.",
    "population.workers",
    "decode.",
    "evaluate.",
    "checkpoint.",
    "device",
    "num_threads",
    "compile",
)


@dataclass(frozen=True, kw_only=True)
class DialogueDataConfig(Checked):
    """Logged dialogues in files, where the task is "data"."""

    files: tuple[str, ...] = ()  # files of dialogues: .jsonl, .json, .jsonl.gz, .parquet
    # Names in the files that differ from the expected ones, as NAME=MEANING: chat=messages
    # score=reward; tokens= leaves an entry out.
    columns: tuple[Annotated[str, named_pair("chat=messages")], ...] = ()
    # Further roles, each the agent's or not: bot=agent caller=environment.
    roles: tuple[Annotated[str, named_pair("bot=agent")], ...] = ()
    # "characters", "words" (between spaces), or the path of a tokenizer: a folder, or a JSON file
    # of Hugging Face (extra: text). Empty: the language model's own, with the special tokens that
    # it lacks; without a model characters.
    tokenizer: str = ""
    # Write dialogues by the tokenizer's own chat template, with no token added: for models that
    # follow instructions (extra: text).
    chat_template: bool = False
    # Add the special tokens that another library's tokenizer lacks, where there is no chat template
    # to write dialogues by.
    add_special_tokens: bool = False
    # Maximal length of a row in tokens; None: the model's context.
    max_len: Annotated[int, at_least(2)] | None = None
    too_long: Literal["refuse", "cut", "skip"] = "refuse"  # what to do with a longer row
    malformed: Literal["refuse", "skip"] = "refuse"  # what to do with a malformed row
    # Reward of each of the agent's tokens; below 0 it makes the agent brief.
    token_reward: float = 0.0
    held_out: float = 0.05  # fraction of the rows that is held out for evaluation
    split_seed: int = 0  # seed of the choice of held-out rows
    # Lengths that batches are padded to; empty: the length of their longest row.
    buckets: tuple[PositiveInt, ...] = ()
    # Batches whose rows are sorted by length together: less padding, for trunks that compute it.
    # But if length and return are correlated, V comes out too high: see `DialogueDataset`.
    sort_window: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer in ("characters", "words"):
            self.check_template(self.tokenizer)
        for pair in self.roles:
            if pair.partition("=")[2] not in ("agent", "environment"):
                raise ValueError(f"roles: {pair!r} must end in =agent or =environment")
        if not 0 < self.held_out < 1:
            raise ValueError(
                f"held_out={self.held_out} must be between 0 and 1: without held-out rows there "
                "is nothing to evaluate on, and without others nothing to learn from"
            )

    def check_template(self, tokenizer: str) -> None:
        """Raise ValueError if a chat template is asked of a tokenizer made from the data."""
        if self.chat_template:
            raise ValueError(
                "chat_template=True needs the tokenizer of a Hugging Face model, but "
                f"tokenizer={tokenizer!r} has no chat template: give the model's folder "
                "(--data.tokenizer FOLDER)"
            )


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Checked):
    """Low-rank adapters of a language model's layers, which are learnt while its weights stay
    frozen.

    >>> LoRAConfig(rank=8).alpha
    16.0
    """

    # Rank of the adapters; 0: no adapters, the whole language model learns.
    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 16.0  # scale of the adapters: they are multiplied by alpha / rank
    dropout: FractionBelowOne = 0.0  # dropout of the adapters' inputs
    # Layers with adapters, by the last part of their names, such as q_proj; empty: those of the
    # attention that compute queries, keys and values.
    layers: tuple[str, ...] = ()
    # Whether the input and output embeddings learn as a whole. None: if tokens were added to the
    # model's, whose embeddings would stay random; `with_sizes` sets it.
    learn_embeddings: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rank and (self.dropout or self.layers or self.learn_embeddings is not None):
            raise ValueError(
                f"{short_repr(self)} describes adapters, and rank=0 makes none: set lora.rank, "
                "such as 8, or leave these settings out"
            )


@dataclass(frozen=True, kw_only=True)
class ScriptsConfig(Checked):
    """The scripted players of the logged games, with the relative frequency of each.

    >>> ScriptsConfig(expert=0.15, fair=0.85, random=0, wrong=0, stuck=0, non_word=0).fractions()
    {'expert': 0.15, 'fair': 0.85}
    """

    expert: NonNegativeFloat = 0.15  # plays the most informative guess
    fair: NonNegativeFloat = 0.25  # plays any word that can be the secret
    random: NonNegativeFloat = 0.25  # plays any word
    wrong: NonNegativeFloat = 0.1  # plays a word that cannot be the secret
    stuck: NonNegativeFloat = 0.2  # plays a fair guess, and repeats it
    non_word: NonNegativeFloat = 0.05  # plays letters that are not a word

    def __post_init__(self) -> None:
        super().__post_init__()
        if not sum(asdict(self).values()) > 0:
            raise ValueError("no script plays: give at least one a weight, such as fair=1.0")

    def fractions(self) -> dict[str, float]:
        """The fraction of all games that each player has, by name; players without games are left
        out.
        """
        weights: dict[str, float] = asdict(self)
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight}


@dataclass(frozen=True, kw_only=True)
class BranchingSettings(Checked):
    """Games for which one step of improvement is not enough: how many of each kind per secret.

    See `raffia.lm.envs.wordle.data`.
    """

    num_expert: PositiveInt = 1  # games of the expert for each secret
    num_adversarial: PositiveInt = 3  # misleading games for each secret
    num_slow: PositiveInt = 3  # slow games for each secret
    num_repeats: PositiveInt = 3  # repetitions of the first word in slow games


@dataclass(frozen=True, kw_only=True)
class WordleConfig(Checked):
    """Wordle: the game, and games of scripted players to learn from."""

    # Number of words, from the built-in list or from the file; 0: all.
    num_words: NonNegativeInt = 24
    words: str = ""  # path of a file with a word on each line; empty: the built-in list
    # Tokens are whole words and rows of colours, or single letters and colours.
    layout: Literal["words", "letters"] = "words"
    # Number of words that are guessed in the data but are never the secret there; games with these
    # as secrets are a separate evaluation.
    num_held_out: NonNegativeInt = 0
    # Kind of games to learn from: of the scripts, or branching ones.
    games: Literal["scripts", "branching"] = "scripts"
    num_games: PositiveInt = 4_000  # number of games by scripts
    data_seed: int = 0  # seed of words and games; the run's seed does not change them
    scripts: ScriptsConfig = field(default_factory=ScriptsConfig)
    branching: BranchingSettings = field(default_factory=BranchingSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_words and self.num_held_out >= self.num_words:
            raise ValueError(
                f"num_held_out={self.num_held_out} of num_words={self.num_words} leaves no secret "
                "to learn from: hold out fewer"
            )


@dataclass(frozen=True, kw_only=True)
class ILQLEvaluateConfig(Checked):
    """Evaluations: games that the agent plays, or losses on held-out rows."""

    every_updates: PositiveInt = 500  # updates between evaluations
    # Games of an evaluation; on data: maximal number of held-out rows.
    num_episodes: PositiveInt = 256
    batch_size: PositiveInt = 256  # games or rows that are computed together
    # Further evaluations with `decode` at these weights of the advantage; 0 is the policy alone.
    # This shows the effect of the values.
    adv_weights: tuple[NonNegativeFloat, ...] = ()
    target_return: float | None = None  # mean return of `decode` at which the run ends
    # On data: factory of the `Language_Environment` for evaluations, in addition to losses on
    # held-out rows: package.module:name or file.py:name. `--env` names it and allows its import;
    # without that flag only installed packages are imported.
    env: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.env and not all(self.env.rpartition(":")):
            raise ValueError(f"env={self.env!r} must be package.module:name or file.py:name")


@dataclass(frozen=True, kw_only=True)
class ILQLRun(ILQLConfig):
    """A whole run of ILQL, or of what it is compared with: see `method`.

    >>> ILQLRun(seed=3, task="wordle", num_updates=100).wordle.layout
    'words'
    """

    # Since earlier versions.
    RENAMED: ClassVar[Mapping[tuple[str, str], str]] = RENAMED

    seed: int = 0  # seed of all randomness of the run
    device: str = "cpu"  # device of networks and gradients, such as cuda or cuda:1
    # Threads of torch; 0: one for small networks, which more threads would slow down, else torch's
    # default, all cores. It is fixed when the run starts: other numbers differ in the last bits.
    num_threads: NonNegativeInt = 0
    # Games of Wordle by scripted players, or dialogues in files.
    task: Literal["wordle", "data"] = "wordle"

    wordle: WordleConfig = field(default_factory=WordleConfig)
    data: DialogueDataConfig = field(default_factory=DialogueDataConfig)
    # Folder with a pretrained causal language model as Hugging Face stores it: a GPT-2, or with the
    # extra `hf` any that transformers knows; empty: random weights. All sizes are those of
    # model.trunk: `raffia.recipes.ilql.with_sizes` copies them from there.
    language_model: str = ""
    # Low-rank adapters of a pretrained language model (LoRA).
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    num_updates: PositiveInt = 2_000  # updates of the whole run
    batch_size: PositiveInt = 64  # dialogues in a batch
    # Equal parts of a batch, one after the other, to need less memory.
    num_micro_batches: PositiveInt = 1
    compile: bool = False  # use torch.compile for the gradients; pays on a GPU
    learners: LearnersConfig = field(default_factory=LearnersConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluators: EvaluatorsConfig = field(default_factory=EvaluatorsConfig)
    evaluate: ILQLEvaluateConfig = field(default_factory=ILQLEvaluateConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_threads", self.num_threads, 0, 1024)  # torch dies of too many
        if self.batch_size % self.num_micro_batches:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be divided into "
                f"num_micro_batches={self.num_micro_batches} equal parts"
            )
        if self.task == "wordle" and self.data.files:
            raise ValueError(
                f"data.files={self.data.files} are of a run on data, and the task is 'wordle': "
                "name them by --data FILE, which sets task='data', too"
            )
        if self.task == "wordle" and self.evaluate.env:
            raise ValueError(
                f"env={self.evaluate.env!r} is for runs on data (--data FILE), but wordle is "
                "evaluated in its own games: leave env out"
            )
        if not self.plays and self.evaluate.target_return is not None:
            raise ValueError(
                f"target_return={self.evaluate.target_return} needs games, and runs on data play "
                "none: leave it out, because num_updates ends the run, or name an environment "
                "with --env file.py:name"
            )
        self.population.check(
            compile=self.compile,
            evolvable=self.model.evolvable_heads,
            numbers=hyper_numbers(self),
        )
        if self.num_micro_batches > 1:
            check_alone(
                f"num_micro_batches={self.num_micro_batches}",
                "it divides each batch into equal parts",
                {"a range of batch_size": self.population.changes_batch_size},
            )
        if self.population.replay != "shared":
            raise ValueError(
                f"population.replay={self.population.replay!r} has no effect: nothing is played "
                "here, and all members learn from the same data. Leave it out"
            )
        self._check_learners()
        check_workers(self, ("evaluators",))
        self._check_language_model()
        self._check_decoding()

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def title(self) -> str:
        """The task of a run, without the seed."""
        return f"ILQL on {self.task}"

    @property
    def plays(self) -> bool:
        """Whether the agent is evaluated in dialogues that it holds itself."""
        return self.task == "wordle" or bool(self.evaluate.env)

    def _check_learners(self) -> None:
        num = self.learners.num
        if num == 1:
            return
        if self.batch_size % (num * self.num_micro_batches):
            raise ValueError(
                f"batch_size={self.batch_size} cannot be divided equally among learners.num={num} "
                f"processes with num_micro_batches={self.num_micro_batches} parts each: use a "
                f"batch_size that {num * self.num_micro_batches} divides"
            )
        check_alone(
            f"learners.num={num}",
            "its processes share the batches of one agent",
            {f"population.size={self.population.size}": self.population.size > 1},
        )

    def _check_language_model(self) -> None:
        trunk, lora = self.model.trunk, self.lora
        if not (self.data.tokenizer or self.language_model):
            self.data.check_template("characters")
        if not self.language_model and (lora.rank or trunk.kind != "gpt"):
            what = f"lora.rank={lora.rank}" if lora.rank else f"model.trunk.kind={trunk.kind!r}"
            raise ValueError(
                f"{what} needs an existing language model: give its folder, language_model=FOLDER "
                "(on the command line --language_model FOLDER)"
            )
        if self.compile and max(trunk.dropout, lora.dropout) > 0:
            raise ValueError(
                "compile=True cannot be combined with dropout, whose random draws could not be "
                "repeated when the run is resumed. Set model.trunk.dropout=0.0 and "
                "lora.dropout=0.0, or compile=False"
            )

    def _check_decoding(self) -> None:
        weights = self.evaluate.adv_weights
        wants = self.decode.needs_values or any(weights)
        if not self.plays and weights:
            raise ValueError(
                f"adv_weights={weights} needs games, and runs on data play none: leave it out, or "
                "name an environment with --env file.py:name"
            )
        if self.plays and wants and not self.loss.needs_values:
            raise ValueError(
                "decoding uses values, but this agent learns none: set decode.include_adv=False "
                'and evaluate.adv_weights=(), as method("bc", config) does for the former'
            )
        if self.plays and wants and not self.model.per_token:
            raise ValueError(
                "decoding uses the value of each token, but with model.per_token=False Q is one "
                "number for a whole utterance: set decode.include_adv=False and "
                "evaluate.adv_weights=()"
            )
