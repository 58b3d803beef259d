"""Tokenizers from local files: Hugging Face's (`pip install 'raffia[text]'`), and saved ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raffia.files import foreign_reader, make_folder, parse_json, write_atomically
from raffia.lm.tokenizers.tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    PieceTokenizer,
    SpecialTokens,
    Tokenizer,
    WordTokenizer,
    write_description,
)

if TYPE_CHECKING:
    import tokenizers

_FILE = "tokenizer.json"
_KIND = "huggingface"
_OF_KIND = {cls.kind: cls for cls in (PieceTokenizer, WordTokenizer)}


class HFTokenizer(SpecialTokens):
    """A tokenizer of the `tokenizers` library, from its JSON file or a model's local folder.

    special_tokens: role -> token, for roles whose token is called otherwise than in SPECIAL_TOKENS:
        {"pad": "[PAD]"}. The six must differ.
    add_missing: give a token that is not there a new number at the end. A model's vocabulary must
        then be as large as `num_tokens`.

    >>> import tempfile
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> theirs = Tokenizer(models.WordLevel({"hi": 0, "[UNK]": 1}, unk_token="[UNK]"))
    >>> theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     theirs.save(f"{folder}/tokenizer.json")
    ...     tokenizer = HFTokenizer(folder, add_missing=True)
    >>> tokenizer.encode("hi there"), tokenizer.num_tokens, tokenizer.eoa_token_id
    ([0, 1], 8, 3)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_missing: bool = False,
    ) -> None:
        unknown = sorted(set(special_tokens or {}) - set(SPECIAL_TOKENS))
        if unknown:
            raise ValueError(f"there is no role {unknown[0]!r}; the roles are {[*SPECIAL_TOKENS]}")
        self._names = {**SPECIAL_TOKENS, **(special_tokens or {})}
        if len(set(self._names.values())) < len(self._names):
            raise ValueError(f"the special tokens must differ from each other, got {self._names}")
        self._tokenizer = _read(Path(path))
        missing = [t for t in self._names.values() if self._tokenizer.token_to_id(t) is None]
        if missing and not add_missing:
            raise ValueError(
                f"{path} has no token {', '.join(missing)}. If it has others for this, name them: "
                f"special_tokens={{{self._role(missing[0])!r}: '...'}}; to add them: "
                "add_missing=True, and a model whose vocabulary is as large as num_tokens"
            )
        # Also those that are there: so decoding leaves them out.
        self._tokenizer.add_special_tokens(list(self._names.values()))
        self._tokenizer.encode_special_tokens = True  # as any text: none is taken for them
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self._num_tokens = max(numbers) + 1  # numbers may have gaps

    @property
    def num_tokens(self) -> int:
        """One more than the largest number of a token."""
        return self._num_tokens

    def special(self, role: str) -> int:
        """The number of the special token that has this role."""
        return self.token_to_id(self._names[role])

    def encode(self, text: str) -> list[int]:
        """The tokens of an utterance: never special ones, whatever the text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones are left out."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_to_id(self, token: str) -> int:
        """The number of a token."""
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise KeyError(f"there is no token {token!r}")
        return int(number)

    def id_to_token(self, number: int) -> str:
        """The token of a number."""
        token = self._tokenizer.id_to_token(number) if number >= 0 else None
        if token is None:
            raise KeyError(f"there is no token {number}; they are below {self.num_tokens}")
        return str(token)

    def save(self, folder: str | Path) -> None:
        """Write it into a folder, for `load_tokenizer`; the JSON file there is a complete one."""
        make_folder(folder)
        write_atomically(Path(folder, _FILE), self._tokenizer.to_str(pretty=True).encode())
        # Last: where it exists, the other is whole.
        write_description(folder, {"kind": _KIND, "special_tokens": self._names})

    def _role(self, token: str) -> str:
        return next(role for role, name in self._names.items() if name == token)


def _read(path: Path) -> tokenizers.Tokenizer:
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file}; give the JSON file of a `tokenizers` tokenizer, or a folder that "
            f"has it as {_FILE}. `tokenizer.save_pretrained(folder)` of a fast one writes it"
        )
    library = _library()
    with foreign_reader(file, "it is no tokenizer that `tokenizers` can read"):
        found = library.Tokenizer.from_file(str(file))
    found.no_truncation()
    found.no_padding()
    return found


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "tokenizers of Hugging Face need the package tokenizers: pip install 'raffia[text]'"
        ) from error
    return tokenizers


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save(folder)` wrote, of whatever kind.

    >>> import tempfile
    >>> from raffia.lm.tokenizers.tokenizer import character_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     character_tokenizer(["abc"]).save(folder)
    ...     load_tokenizer(folder).encode("cab")
    [2, 0, 1]
    """
    path = Path(folder, TOKENIZER_FILE)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}; tokenizer.save(folder) writes it. For a folder of Hugging Face: "
            "HFTokenizer(folder)"
        )
    description: Any = parse_json(path, path.read_bytes())
    with foreign_reader(path, "it is damaged, or was not written by save()"):
        kind = description["kind"]
        if kind == _KIND:
            special = {
                str(role): _text(name) for role, name in description["special_tokens"].items()
            }
            return HFTokenizer(folder, special_tokens=special)
        unknown = description["unknown"]
        tokens = tuple(map(_text, description["tokens"]))
        return _OF_KIND[kind](tokens, None if unknown is None else _text(unknown))


def _text(token: object) -> str:
    if not isinstance(token, str):
        raise TypeError(f"a token is a text, not {token!r:.40}")
    token.encode()  # half a surrogate pair is none
    return token
