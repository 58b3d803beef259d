"""Building a token store from the rows of a source: what is left out, and when to build again.

A store in a folder is made once and mapped to memory from then on, until the source, the tokenizer
or a setting is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raffia.data.readers.episode import Location, MalformedDataError, Path
from raffia.files import DamagedFileError
from raffia.hints import check_choice, check_range
from raffia.lm.data.data_point import DataPoint, TokenReward
from raffia.lm.data.dialogue_rows import TokenRow
from raffia.lm.data.dialogue_sources import DialogueSource, FileDialogues, JoinedDialogues
from raffia.lm.data.token_store import StoreReport, TokenStore
from raffia.lm.data.utterances import check_tokens
from raffia.lm.tokenizers.tokenizer import Tokenizer, tokenizer_checksum

TooLong = Literal["refuse", "cut", "skip"]
Malformed = Literal["refuse", "skip"]


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """How a row becomes tokens, and what is done with one that does not or is too long.

    >>> RowRules(max_len=8, too_long="shorten")
    Traceback (most recent call last):
    ...
    ValueError: too_long='shorten' must be one of 'refuse', 'cut', 'skip'
    """

    token_reward: TokenReward | None = None
    max_len: int | None = None  # tokens: the model's context; None is without an end
    too_long: TooLong = "refuse"
    malformed: Malformed = "refuse"

    def __post_init__(self) -> None:
        check_choice("too_long", self.too_long, get_args(TooLong))
        check_choice("malformed", self.malformed, get_args(Malformed))
        if self.max_len is not None:
            check_range("max_len", self.max_len, 1)

    def settings(self) -> dict[str, Any]:
        """All settings as JSON.

        >>> RowRules(max_len=8).settings()["max_len"]
        8
        """
        return {
            "token_reward": None if self.token_reward is None else self.token_reward.settings(),
            "max_len": None if self.max_len is None else int(self.max_len),  # may be of numpy
            "too_long": self.too_long,
            "malformed": self.malformed,
        }


class RowTooLongError(MalformedDataError):
    """A row has more tokens than the context holds.

    >>> raise RowTooLongError("a.jsonl", "line 3", "it has 9 tokens")
    Traceback (most recent call last):
    ...
    raffia.lm.data.dialogue_building.RowTooLongError: a.jsonl: line 3: it has 9 tokens
    """


def read_points(
    source: DialogueSource,
    tokenizer: Tokenizer,
    rules: RowRules,
    report: StoreReport,
    progress: Callable[[int], None] | None = None,
) -> Iterator[DataPoint]:
    """The rows of a source as data points; an error if none is left.

    report: counts those that are left out.
    progress: called with the number of rows that were read, for each.

    >>> from types import SimpleNamespace
    >>> from raffia.lm.data.dialogue_sources import TranscriptDialogues
    >>> ascii = SimpleNamespace(num_tokens=134, pad_token_id=128, bos_token_id=129,
    ...     eos_token_id=130, boa_token_id=131, eoa_token_id=132, eod_token_id=133,
    ...     encode=lambda text: list(text.encode("ascii")))
    >>> chats = TranscriptDialogues([[{"role": "user", "content": "A"}], 7])
    >>> report = StoreReport()
    >>> points = list(read_points(chats, ascii, RowRules(malformed="skip"), report))
    >>> [point.tokens for point in points], report.num_skipped
    ([[129, 65, 130, 133]], 1)
    """
    found = 0
    for number, (location, raw) in enumerate(source.rows(), 1):
        if progress is not None:
            progress(number)
        try:
            point = _point(source.read, raw, location, tokenizer, rules.token_reward)
        except MalformedDataError as error:
            if rules.malformed == "refuse":
                raise
            report.skip(str(error))
            continue
        length = len(point.tokens)
        if rules.max_len is not None and length > rules.max_len and rules.too_long != "cut":
            if rules.too_long == "refuse":
                raise _too_long(location, length, rules.max_len)
            report.skip(f"{location.path}: {location.where}: {length} tokens do not fit")
            continue
        found += 1
        yield point.cut(rules.max_len)
    if isinstance(source, FileDialogues | JoinedDialogues) and (names := source.unseen_columns()):
        raise ValueError(
            f"columns: no row has an entry {min(names)!r}, to which they give a meaning: correct "
            "its name, or leave it out"
        )
    if not found and report.num_skipped:
        raise ValueError(
            f"no row is left to learn from: all {report.num_skipped} were skipped, the first one "
            f"because: {report.reasons[0]}"
        )
    if not found:
        raise ValueError("there are no rows to learn from: the source is empty")


def _point(
    read: Callable[[Any, Location], Any],
    raw: Any,
    location: Location,
    tokenizer: Tokenizer,
    token_reward: TokenReward | None,
) -> DataPoint:
    found = read(raw, location)
    try:
        if isinstance(found, TokenRow):
            point = DataPoint.from_tokens(
                found.tokens,
                found.action_idxs,
                found.rewards,
                terminal=found.terminal,
                end_of_action=tokenizer.eoa_token_id,
                token_reward=token_reward,
            )
        else:
            point = DataPoint.from_obs(found, tokenizer, token_reward)
        check_tokens(point.tokens, tokenizer.num_tokens)
    except (ValueError, KeyError) as error:  # a tokenizer may raise either for what it lacks
        missing = isinstance(error, KeyError)
        why = f"the tokenizer has no token for part of it: {error}" if missing else str(error)
        raise MalformedDataError(location.path, location.where, why) from error
    return point


def _too_long(location: Location, length: int, max_len: int) -> RowTooLongError:
    return RowTooLongError(
        location.path,
        location.where,
        f"it has {length} tokens, more than the {max_len} of the context: pass max_len={length} "
        "or more (if the model's block_size allows it), too_long='cut' to use only the first "
        "tokens (the row is then not terminal, and the rest is ignored), or too_long='skip' to "
        "leave such rows out",
    )


def build_store(
    source: DialogueSource,
    tokenizer: Tokenizer,
    rules: RowRules,
    folder: Path | None,
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """The store of a source: in memory, or in a folder, where it is made only if it has to be.

    A damaged store, or one that was made from other rows, with another tokenizer or under other
    rules, is made again.

    >>> from raffia.lm.data.dialogue_sources import ObservationDialogues
    >>> build_store(ObservationDialogues([]), None, RowRules(), None)
    Traceback (most recent call last):
    ...
    ValueError: there are no rows to learn from: the source is empty
    """
    report = StoreReport()
    points = read_points(source, tokenizer, rules, report, progress)
    if folder is None:
        return TokenStore.of(points, report)
    made_by = {
        "source": source.settings(),
        "tokenizer": tokenizer_checksum(tokenizer),
        "rules": rules.settings(),
    }
    settings = json.loads(json.dumps(made_by))  # as the folder gives it back: tuples are lists

    def accept(key: dict[str, Any]) -> bool:
        if key.get("settings") != settings:
            return False
        stamp = source.stamp()
        return (stamp is not None and key.get("stamp") == stamp) or (
            key.get("checksum") == source.checksum()
        )

    try:
        found = TokenStore.open(folder, accept)
        why = "the previous one was made from other rows or settings"
    except FileNotFoundError:
        found, why = None, "there was none"
    except DamagedFileError as error:
        found, why = None, f"the previous one was damaged ({error})"
    if found is not None:
        return found
    stamp = source.stamp()
    key = {"settings": settings, "stamp": stamp, "checksum": source.checksum()}

    def unchanged() -> Iterator[DataPoint]:
        yield from points
        if source.stamp() != stamp:
            raise RuntimeError(f"{source!r} changed while it was read: read it again")

    TokenStore.write(folder, unchanged(), key=key, report=report)
    made = TokenStore.open(folder, lambda found_key: True)
    assert made is not None
    made.origin = f"made: {why}"
    return made
