"""The data of a run of ILQL, and its tokenizer: played games, or files of dialogues."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raffia.data.readers.episode import MalformedDataError
from raffia.files import (
    MANIFEST,
    DamagedFileError,
    check_manifest,
    is_unfinished,
    write_manifest,
)
from raffia.functional.seeds import derive_seed
from raffia.hints import plural
from raffia.lm.data.data_point import ConstantTokenReward
from raffia.lm.data.dialogue import DialogueDataset, ObservationDialogues, read_dialogues
from raffia.lm.data.dialogue_building import RowRules, RowTooLongError, read_points
from raffia.lm.data.dialogue_rows import TokenRow
from raffia.lm.data.dialogue_sources import DialogueSource, JoinedDialogues
from raffia.lm.data.token_store import StoreReport
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.envs.wordle.data import (
    LabelledGame,
    Part,
    branching_games,
    branching_scripts,
    sample_games,
    wordle_letter_tokenizer,
    wordle_word_tokenizer,
)
from raffia.lm.envs.wordle.game import Wordle
from raffia.lm.envs.wordle.policies import (
    Fitting,
    InformationGain,
    NonWord,
    RandomWord,
    Repeat,
    Script,
    Wrong,
)
from raffia.lm.envs.wordle.vocabulary import Vocabulary
from raffia.lm.tokenizers.chat_template import ChatTemplate
from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer, HFTokenizer, load_tokenizer
from raffia.lm.tokenizers.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    WordTokenizer,
    character_tokenizer,
    tokenizer_checksum,
)
from raffia.recipes.ilql.config import DialogueDataConfig, ILQLRun, WordleConfig
from raffia.recipes.run_folder import TOKENIZER, TOKENS
from raffia.train.experiment import RunError

TOKENIZER_JSON = "tokenizer.json"  # of Hugging Face
GUESS = {"words": 2, "letters": 7}  # tokens of the longest guess in the data, with its end
PAUSE = 5.0  # seconds between lines that tell how far the files are read
NON_WORD = "<?>"  # for whatever guess is not a word, where words are tokens


@dataclass(frozen=True)
class Corpus:
    """The data to learn from, and the held-out data for evaluations where no games are played.

    >>> from dataclasses import replace
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> corpus = make_corpus(ILQL_PRESETS["ilql-smoke"], None)
    >>> len(corpus.learnt), corpus.held_out is None
    (200, True)
    """

    tokenizer: Tokenizer
    learnt: DialogueDataset
    held_out: DialogueDataset | None

    def digest(self) -> str:
        """A digest of the rows that are learnt from: their tokens, indices and rewards."""
        code = hashlib.sha256(tokenizer_checksum(self.tokenizer).encode())
        code.update(self.learnt.store.checksum.encode())
        code.update(self.learnt.rows.astype("<i8").tobytes())
        return code.hexdigest()


def make_corpus(
    config: ILQLRun, folder: Path | None, tell: Callable[[str], None] = lambda line: None
) -> Corpus:
    """Read or play what the config names.

    folder: the run's, which holds the tokenizer and, of files, the tokens; None: none is written.
    tell: gets a line each few seconds while files are read.
    """
    source = None if config.task == "wordle" else source_of(config.data)
    tokenizer = find_tokenizer(config, folder, source, may_rebuild=True, tell=tell)
    block_size = config.model.trunk.block_size
    if source is None:
        games = ObservationDialogues(play_games(config.wordle), name="the games")
        try:
            learnt = DialogueDataset.build(games, tokenizer, max_len=block_size)
        except RowTooLongError:
            longest = DialogueDataset.build(games, tokenizer).statistics().longest
            raise RunError(
                f"model.trunk.block_size={block_size} is the model's context, but the longest game "
                f"has {longest} tokens: set it to {longest} or more"
            ) from None
        return Corpus(tokenizer, _best(learnt, config), None)
    data = config.data
    max_len = block_size if data.max_len is None else data.max_len
    if max_len > block_size:
        raise RunError(
            f"data.max_len={max_len} exceeds the model's context of {block_size} tokens: leave it "
            f"out, or set it to {block_size} or less"
        )
    with _named_as_settings():
        whole = DialogueDataset.build(
            source,
            tokenizer,
            token_reward=ConstantTokenReward(data.token_reward) if data.token_reward else None,
            max_len=max_len,
            too_long=data.too_long,
            malformed=data.malformed,
            folder=None if folder is None else folder / TOKENS,
            buckets=data.buckets,
            sort_window=data.sort_window,
            progress=_Progress("encoding dialogues", tell),
        )
    if not whole.store.summary.num_actions.any():
        raise _without_actions(source, tokenizer, data, max_len)
    _refuse_unrewarded(whole, config)
    learnt, held_out = split(whole, data.held_out, data.split_seed)
    return Corpus(tokenizer, _best(learnt, config), held_out)


def _best(data: DialogueDataset, config: ILQLRun) -> DialogueDataset:
    return data if config.keep_best == 1 else data.best(config.keep_best)


def _without_actions(
    source: DialogueSource, tokenizer: Tokenizer, data: DialogueDataConfig, max_len: int
) -> RunError:
    """The error for rows in which the agent does nothing: none has an answer, or all were cut."""
    uncut = read_points(source, tokenizer, RowRules(malformed=data.malformed), StoreReport())
    # An action counts with the state that follows it.
    states = [[*row.state_idxs, row.of_tokens.last_state] for row in uncut if row.action_idxs]
    if not states:
        return RunError(
            "no message is the agent's, so there is nothing to learn: the agent's roles are "
            "assistant, agent and gpt. For other roles: --data.roles bot=agent"
        )
    needed = min([second for _, second, *_ in states]) + 1
    return RunError(
        f"all dialogues are cut after {max_len} tokens, before the agent answers, so there is "
        f"nothing to learn: the first token of an answer needs --data.max_len {needed}, and a "
        "model whose context (--model.trunk.block_size) is no shorter"
    )


def _refuse_unrewarded(data: DialogueDataset, config: ILQLRun) -> None:
    needs = config.loss.needs_values or config.keep_best < 1
    if needs and not any(point.rewards and any(point.rewards) for point in _rewarded(data)):
        is_cut = data.store.summary.episode_return.any()  # of whole dialogues
        within = f" in its first {data.max_len} tokens" if is_cut else ""
        raise RunError(
            f"none of the {len(data)} dialogues has a reward other than 0{within}, so nothing "
            'distinguishes good answers from bad ones: give rewards, "reward" beside a message or '
            "in the row (--data.columns score=reward if it has another name). To imitate all of "
            f"them: --method bc{' --keep_best 1' if config.keep_best < 1 else ''}"
        )


def _rewarded(data: DialogueDataset) -> Iterator[Any]:
    """The rows that might have a reward, those that surely have one first."""
    order = np.argsort(data.store.summary.episode_return == 0, kind="stable")
    return (data[int(number)] for number in order)


def describe_corpus(corpus: Corpus) -> str:
    """Describe the data to learn from in one line.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> describe_corpus(make_corpus(ILQL_PRESETS["ilql-smoke"], None))
    '200 dialogues, 808 answers, 3,632 tokens (the longest 26); return -3.53 (-6 to 0), ...'
    """
    found = corpus.learnt.statistics()
    returns = corpus.learnt.store.summary.episode_return[corpus.learnt.rows]
    text = (
        f"{found.num_rows:,} dialogues, {found.num_utterances:,} answers, {found.num_tokens:,} "
        f"tokens (the longest {found.longest:,}); return {found.mean_return:.4g} "
        f"({returns.min():.4g} to {returns.max():.4g}), deviation {returns.std():.3g}"
    )
    if found.num_skipped:
        text += f"; {plural(found.num_skipped, 'row')} skipped"
    if corpus.held_out is not None:
        text += f"; {len(corpus.held_out):,} more held out"
    return text


def describe_template(config: ILQLRun, tokenizer: Tokenizer) -> str:
    """The notice that a model's own chat template is not used; "" if it has none.

    >>> describe_template(ILQLRun(), character_tokenizer("a"))
    ''
    """
    if not config.language_model or isinstance(tokenizer, ChatTokenizer):
        return ""
    try:
        ChatTemplate.read(config.language_model)
    except (FileNotFoundError, DamagedFileError):
        return ""
    return (
        f"{config.language_model} has a chat template, which is not used: utterances are put "
        "between Raffia's own marks, which tell no roles but whose turn it is. To "
        "use it: --data.chat_template"
    )


def split(
    data: DialogueDataset, fraction: float, seed: int
) -> tuple[DialogueDataset, DialogueDataset]:
    """Split rows into those to learn from and held-out ones, drawn by the seed.

    >>> from raffia.lm.data.dialogue import DataPoint, Vocabulary as Tokens
    >>> rows = [DataPoint.from_tokens([1, 5], [0], [float(i)]) for i in range(10)]
    >>> learnt, held_out = split(DialogueDataset.of_points(rows, Tokens(9)), 0.2, seed=0)
    >>> len(learnt), len(held_out)
    (8, 2)
    """
    num = len(data)
    if num < 2:
        raise ValueError(
            f"{num} row cannot be split into rows to learn from and held-out rows: give 2 or more"
        )
    order = np.random.Generator(np.random.PCG64(derive_seed(seed, "held out"))).permutation(num)
    num_held_out = min(num - 1, max(1, round(fraction * num)))
    return data.select(np.sort(order[num_held_out:])), data.select(np.sort(order[:num_held_out]))


# -- games


def make_wordle(config: WordleConfig, *, held_out: bool = False) -> Wordle:
    """The game, with its words; its secrets are those of the data, or those that are held out.

    >>> config = WordleConfig(num_words=30, num_held_out=6)
    >>> len(make_wordle(config).vocabulary), len(make_wordle(config, held_out=True).secrets)
    (30, 6)
    """
    words = Vocabulary.from_file(config.words) if config.words else Vocabulary.built_in()
    if config.num_words:
        words = words.subset(config.num_words, seed=config.data_seed)
    if not (config.num_held_out or held_out):
        return Wordle(vocabulary=words)
    if not 0 < config.num_held_out < len(words):
        raise RunError(
            f"wordle.num_held_out={config.num_held_out} must be in 1..{len(words) - 1}: there are "
            f"{len(words)} words"
        )
    learnt = words.subset(
        len(words) - config.num_held_out, seed=derive_seed(config.data_seed, "held-out secrets")
    )
    others = tuple(word for word in words if word not in learnt)
    return Wordle(vocabulary=words, secrets=others if held_out else learnt.words)


def play_games(config: WordleConfig) -> list[LabelledGame]:
    """Play the games to learn from.

    >>> len(play_games(WordleConfig(num_games=50)))
    50
    """
    wordle = make_wordle(config)
    if config.games == "branching":
        return branching_games(wordle, branching_scripts(wordle, **asdict(config.branching)))
    scripts: dict[str, Script] = {
        "expert": InformationGain(),
        "fair": Fitting(),
        "random": RandomWord(),
        "wrong": Wrong(),
        "stuck": Repeat(Fitting()),
        "non_word": NonWord(),
    }
    parts, start = [], 0.0
    for name, fraction in config.scripts.fractions().items():
        end = start + fraction * config.num_games  # of whole numbers that sum to num_games
        parts.append(Part(name, scripts[name], round(end) - round(start)))
        start = end
    return sample_games(wordle, parts, config.data_seed)


def for_games(decode: DecodeConfig, config: WordleConfig) -> DecodeConfig:
    """The decoding for games, which ends an utterance that is no longer a guess.

    >>> for_games(DecodeConfig(), WordleConfig()).max_new_tokens
    2
    """
    most = GUESS[config.layout]
    return replace(decode, max_new_tokens=min(most, decode.max_new_tokens or most))


def longest_game(config: WordleConfig) -> int:
    """Tokens that a game may have: those of the data, and what the agent may see.

    >>> longest_game(WordleConfig()), longest_game(WordleConfig(layout="letters"))
    (28, 80)
    """
    colours = {"words": 1, "letters": 5}[config.layout] + 1  # with their end
    guess = GUESS[config.layout]
    # A guess that was cut where it had no end gets one when it is read again.
    return max(1 + 6 * (guess + colours) + 1, 1 + 5 * (guess + 1 + colours) + guess)


# -- files


def source_of(config: DialogueDataConfig) -> DialogueSource:
    """The rows of the files.

    >>> source_of(DialogueDataConfig())
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: data.files is empty, so there is nothing to learn from: give
    --data.files chats.jsonl
    """
    if not config.files:
        raise RunError(
            "data.files is empty, so there is nothing to learn from: give --data.files chats.jsonl"
        )
    columns = dict(_pair(pair) for pair in config.columns)
    roles = {name: meaning == "agent" for name, meaning in map(_pair, config.roles)}
    found = [read_dialogues(path, columns=columns, roles=roles) for path in config.files]
    return found[0] if len(found) == 1 else JoinedDialogues(found)


def _pair(text: str) -> tuple[str, str | None]:
    name, _, meaning = text.partition("=")
    return name, meaning or None


def find_tokenizer(
    config: ILQLRun,
    folder: Path | None,
    source: DialogueSource | None = None,
    *,
    may_rebuild: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Tokenizer:
    """The tokenizer in the run's folder; made, and written there, if it has none yet.

    source: the rows of files, where they are open already.
    may_rebuild: make one that is damaged again of the data, as a run that is resumed may, since
        what its checkpoints have learnt from is compared. That of games follows from the config.

    >>> find_tokenizer(ILQLRun(), None).num_tokens  # words, rows of colours, and seven more
    274
    """
    if folder is None:
        return make_tokenizer(config, source, tell)
    home = folder / TOKENIZER
    if (home / TOKENIZER_FILE).exists():
        try:
            check_manifest(home)
            return load_tokenizer(home)
        except (DamagedFileError, FileNotFoundError) as error:
            if config.task != "wordle" and not may_rebuild:
                raise RunError(
                    f"{error}. `raffia resume {folder}` makes the tokenizer again from the data; "
                    "or restore the file"
                ) from error
    made = make_tokenizer(config, source, tell)
    made.save(home)
    write_manifest(home, [entry.name for entry in home.iterdir() if _is_of_tokenizer(entry)])
    return made


def _is_of_tokenizer(path: Path) -> bool:
    return path.name != MANIFEST and not is_unfinished(path.name)


def make_tokenizer(
    config: ILQLRun,
    source: DialogueSource | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Tokenizer:
    """The tokenizer that a config describes."""
    if config.task == "wordle":
        if config.wordle.layout == "letters":
            return wordle_letter_tokenizer()
        return wordle_word_tokenizer(make_wordle(config.wordle).vocabulary, non_word=NON_WORD)
    data, own = config.data, config.language_model
    if not data.tokenizer:
        data = replace(data, tokenizer=own or "characters", add_special_tokens=True)
    if data.tokenizer in ("characters", "words"):
        make = character_tokenizer if data.tokenizer == "characters" else WordTokenizer.from_texts
        with _named_as_settings():
            skip, progress = data.malformed == "skip", _Progress("reading dialogues", tell)
            return make(_texts(source or source_of(data), progress, skip=skip))
    path = Path(data.tokenizer)
    if (path / TOKENIZER_FILE).exists() and not data.chat_template:
        return load_tokenizer(path)
    if not path.exists():
        raise RunError(
            f"data.tokenizer={data.tokenizer!r} does not exist: give the folder of a tokenizer, "
            "or characters or words to make one from the data"
        )
    if path.is_dir() and not (path / TOKENIZER_JSON).exists():
        raise RunError(
            f"data.tokenizer={data.tokenizer!r}: the folder has no {TOKENIZER_JSON}. With "
            "transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes "
            "it; or use --data.tokenizer characters, or words, to make one from the data"
        )
    return _of_hugging_face(path, data)


def _of_hugging_face(path: Path, data: DialogueDataConfig) -> HFTokenizer:
    if data.chat_template:
        try:
            return ChatTokenizer(path)
        except (FileNotFoundError, ValueError) as error:
            raise RunError(f"{error}. For a run: --data.no_chat_template") from error
    add_special_tokens = data.add_special_tokens
    try:
        return HFTokenizer(path, add_missing=add_special_tokens)
    except ValueError as error:
        if not add_special_tokens:
            HFTokenizer(path, add_missing=True)  # raises where it is something else
            raise RunError(f"{error}. For a run, --data.add_special_tokens adds them") from error
        raise


@contextmanager
def _named_as_settings() -> Iterator[None]:
    """The mistake in a row, in terms of the settings of a run that correct it."""
    try:
        yield
    except RowTooLongError as error:
        fix = (
            "For a run, the settings are --data.max_len, --data.too_long and "
            "--model.trunk.block_size"
        )
        raise RowTooLongError(error.path, error.where, f"{error.why}. {fix}") from error
    except MalformedDataError as error:
        fix = "--data.malformed skip leaves such rows out"
        if "columns={" in error.why:
            fix = f"For a run: --data.columns chat=messages score=reward tokens=. {fix}"
        if "HFTokenizer(folder" in error.why:
            fix = f"For a run: --data.no_chat_template. {fix}"
        if "roles={" in error.why:
            fix = f"For a run: --data.roles bot=agent caller=environment. {fix}"
        raise MalformedDataError(error.path, error.where, f"{error.why}. {fix}") from error


class _Progress:
    """Tells how many rows were read and how many a second, each few seconds."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        self._what, self._tell = what, tell
        self._start = self._told = time.monotonic()

    def __call__(self, num_rows: int) -> None:
        now = time.monotonic()
        if now - self._told >= PAUSE:
            self._told = now
            rate = num_rows / (now - self._start)
            self._tell(f"{self._what}: {num_rows:,} rows so far, {rate:,.0f} a second")


def _texts(source: DialogueSource, progress: Callable[[int], None], *, skip: bool) -> Iterator[str]:
    """The texts of all rows."""
    for number, (location, raw) in enumerate(source.rows(), 1):
        progress(number)
        try:
            found: Any = source.read(raw, location)
        except MalformedDataError:
            if not skip:
                raise
            continue
        if isinstance(found, TokenRow):
            location.fail(
                "it contains tokens, so their tokenizer must be given: --data.tokenizer FOLDER"
            )
        yield from (text for text, _ in found.to_sequence()[0])
