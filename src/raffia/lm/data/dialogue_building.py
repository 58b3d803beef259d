"""From the rows of a source to a store of tokens: what is left out, and when it is made again.

A store in a folder is made once and mapped to memory from then on, until the source, the tokenizer
or a setting is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from raffia.data.readers.episode import Location as Place
from raffia.data.readers.episode import MalformedDataError, Path
from raffia.files import DamagedFileError
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue_rows import TokenRow
from raffia.lm.data.dialogue_sources import DialogueSource
from raffia.lm.data.token_reward import TokenReward
from raffia.lm.data.token_store import StoreReport, TokenStore
from raffia.lm.data.utterances import DialogueTokenizer, check_tokens

__all__ = ["BuiltStore", "Malformed", "RowRules", "RowTooLongError", "TooLong", "build_store"]

TooLong = Literal["refuse", "cut", "skip"]
Malformed = Literal["refuse", "skip"]
NUM_REASONS = 10  # so many of the rows that were left out are remembered with the reason


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """How a row becomes tokens, and what is done with one that does not or is too long.

    >>> RowRules(max_len=8, too_long="shorten")
    Traceback (most recent call last):
    ...
    ValueError: too_long='shorten'; it is one of 'refuse', 'cut', 'skip'
    """

    token_reward: TokenReward | None = None
    max_len: int | None = None  # tokens: the model's context; None is without an end
    too_long: TooLong = "refuse"
    malformed: Malformed = "refuse"

    def __post_init__(self) -> None:
        for name, kind in (("too_long", TooLong), ("malformed", Malformed)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={getattr(self, name)!r}; it is one of {choices}")
        if self.max_len is not None and self.max_len < 1:
            raise ValueError(f"max_len={self.max_len}: a row has at least its first token")

    def settings(self) -> dict[str, Any]:
        """All of it as JSON.

        >>> RowRules(max_len=8).settings()["max_len"]
        8
        """
        return {
            "token_reward": None if self.token_reward is None else self.token_reward.settings(),
            "max_len": self.max_len,
            "too_long": self.too_long,
            "malformed": self.malformed,
        }


class BuiltStore(NamedTuple):
    """A store, and where it came from: "memory", "folder", or "made: " with the reason.

    >>> BuiltStore(TokenStore.of([]), "memory").origin
    'memory'
    """

    store: TokenStore
    origin: str


class RowTooLongError(MalformedDataError):
    """A row has more tokens than the context holds.

    >>> raise RowTooLongError("a.jsonl", "line 3", "it has 9 tokens")
    Traceback (most recent call last):
    ...
    raffia.lm.data.dialogue_building.RowTooLongError: a.jsonl: line 3: it has 9 tokens
    """


class RowMaker:
    """The rows of a source as data points; counts those that are left out.

    >>> from types import SimpleNamespace
    >>> from raffia.lm.data.dialogue_sources import TranscriptDialogues
    >>> ascii = SimpleNamespace(num_tokens=134, pad_token_id=128, bos_token_id=129,
    ...     eos_token_id=130, boa_token_id=131, eoa_token_id=132, eod_token_id=133,
    ...     encode=lambda text: list(text.encode("ascii")))
    >>> chats = TranscriptDialogues([[{"role": "user", "content": "A"}], 7])
    >>> maker = RowMaker(chats, ascii, RowRules(malformed="skip"))
    >>> [point.tokens for point in maker.points()], maker.report().num_skipped
    ([[129, 65, 130, 133]], 1)
    """

    def __init__(
        self, source: DialogueSource, tokenizer: DialogueTokenizer, rules: RowRules
    ) -> None:
        self._source, self._tokenizer, self._rules = source, tokenizer, rules
        self._skipped, self._reasons = 0, list[str]()

    def report(self) -> StoreReport:
        """What was left out so far."""
        return StoreReport(self._skipped, list(self._reasons))

    def points(self) -> Iterator[DataPoint]:
        """The rows that are left; an error if none is."""
        found = 0
        self._skipped, self._reasons = 0, []
        for place, raw in self._source.rows():
            try:
                point = self._point(raw, place)
            except MalformedDataError as error:
                if self._rules.malformed == "refuse":
                    raise
                self._skip(str(error))
                continue
            if self._is_left_out(point, place):
                self._skip(f"{place.path}: {place.where}: {len(point.tokens)} tokens are too many")
                continue
            found += 1
            yield point.cut(self._rules.max_len)
        if not found:
            why = f"; the first was left out because: {self._reasons[0]}" if self._reasons else ""
            raise ValueError(
                f"no row is left to learn from, {self._skipped} were left out{why}"
                if self._skipped
                else "there are no rows to learn from: the source is empty"
            )

    def _point(self, raw: Any, place: Place) -> DataPoint:
        found = self._source.read(raw, place)
        try:
            if isinstance(found, TokenRow):
                point = DataPoint.from_tokens(
                    found.tokens,
                    found.action_idxs,
                    found.rewards,
                    terminal=found.terminal,
                    end_of_action=self._tokenizer.eoa_token_id,
                    token_reward=self._rules.token_reward,
                )
            else:
                point = DataPoint.from_obs(found, self._tokenizer, self._rules.token_reward)
            check_tokens(point.tokens, self._tokenizer.num_tokens)
        except (ValueError, KeyError) as error:  # a tokenizer may raise either for what it lacks
            missing = isinstance(error, KeyError)
            why = f"the tokenizer has no token for it: {error}" if missing else str(error)
            raise MalformedDataError(place.path, place.where, why) from error
        return point

    def _is_left_out(self, point: DataPoint, place: Place) -> bool:
        max_len, length = self._rules.max_len, len(point.tokens)
        if max_len is None or length <= max_len or self._rules.too_long == "cut":
            return False
        if self._rules.too_long == "refuse":
            raise RowTooLongError(
                place.path,
                place.where,
                f"it has {length} tokens, more than the {max_len} of the context: give "
                f"max_len={length} or more (if the model's block_size allows), too_long='cut' to "
                "take the first tokens (the row is not terminal then, and what comes after counts "
                "for nothing), or too_long='skip' to leave such rows out",
            )
        return True

    def _skip(self, why: str) -> None:
        self._skipped += 1
        if len(self._reasons) < NUM_REASONS:
            self._reasons.append(why)


def build_store(
    source: DialogueSource,
    tokenizer: DialogueTokenizer,
    rules: RowRules,
    folder: Path | None,
) -> BuiltStore:
    """The store of a source: in memory, or in a folder, where it is made only if it has to be.

    A damaged store, or one that was made from other rows, with another tokenizer or under other
    rules, is made again.

    >>> from raffia.lm.data.dialogue_sources import ObservationDialogues
    >>> build_store(ObservationDialogues([]), None, RowRules(), None)
    Traceback (most recent call last):
    ...
    ValueError: there are no rows to learn from: the source is empty
    """
    maker = RowMaker(source, tokenizer, rules)
    if folder is None:
        return BuiltStore(TokenStore.of(maker.points(), maker.report), "memory")
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
        why = "the one there was of other rows or settings"
    except FileNotFoundError:
        found, why = None, "there was none"
    except DamagedFileError as error:
        found, why = None, f"the one there was damaged ({error})"
    if found is not None:
        return BuiltStore(found, "folder")
    stamp = source.stamp()
    key = {"settings": settings, "stamp": stamp, "checksum": source.checksum()}

    def report() -> StoreReport:
        if source.stamp() != stamp:
            raise RuntimeError(f"{source!r} was changed while it was read: read it again")
        return maker.report()

    TokenStore.write(folder, maker.points(), key=key, report=report)
    made = TokenStore.open(folder, lambda found_key: True)
    assert made is not None
    return BuiltStore(made, f"made: {why}")


def tokenizer_checksum(tokenizer: DialogueTokenizer) -> str:
    """Of all that a tokenizer saves, and of its kind.

    >>> from types import SimpleNamespace
    >>> ids = dict(num_tokens=9, pad_token_id=0, bos_token_id=1, eos_token_id=2, boa_token_id=3,
    ...            eoa_token_id=4, eod_token_id=5)
    >>> first = SimpleNamespace(**ids, save=lambda folder: None)
    >>> second = SimpleNamespace(**{**ids, "num_tokens": 10}, save=lambda folder: None)
    >>> tokenizer_checksum(first) == tokenizer_checksum(second)
    False
    """
    code = hashlib.sha256()
    numbers = [tokenizer.num_tokens, tokenizer.pad_token_id]
    numbers += [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.boa_token_id]
    numbers += [tokenizer.eoa_token_id, tokenizer.eod_token_id]
    code.update(f"{type(tokenizer).__qualname__} {numbers}".encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        for root, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(root, name)
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                code.update(f"\n{os.path.relpath(path, folder)} {content}".encode())
    return code.hexdigest()
