"""Tokenizers from local files: Hugging Face's (`pip install 'raffia[text]'`), and saved ones."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from raffia.files import foreign_reader, make_folder, parse_json, write_atomically
from raffia.lm.tokenizers.chat_template import AGENT, OTHER, ChatTemplate, Message
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
_KIND, _CHAT_KIND = "huggingface", "chat"
_MARK = "\ue000"  # begins the stand-in of a content; a character of private use
_OF_KIND = {cls.kind: cls for cls in (PieceTokenizer, WordTokenizer)}
# A dialogue that shows how a template writes messages.
_ASKED, _ANSWERED = "question", "answer"
_PROBE = 2 * [{"role": OTHER, "content": _ASKED}, {"role": AGENT, "content": _ANSWERED}]


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
            raise ValueError(f"the special tokens must differ from each other; got {self._names}")
        self._tokenizer = _read(Path(path))
        missing = [t for t in self._names.values() if self._tokenizer.token_to_id(t) is None]
        if missing and not add_missing:
            raise ValueError(
                f"{path} has no token {', '.join(missing)}. If other tokens have this role, name "
                f"them: special_tokens={{{self._role(missing[0])!r}: '...'}}. To add the missing "
                "ones: add_missing=True, with a model whose vocabulary has num_tokens tokens"
            )
        self._add_special(list(self._names.values()))

    def _add_special(self, tokens: list[str]) -> None:
        """Add special tokens; also those that are there, so that decoding leaves them out."""
        self._tokenizer.add_special_tokens(tokens)
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
            raise KeyError(f"there is no token {number}; token ids are below {self.num_tokens}")
        return str(token)

    def save(self, folder: str | Path) -> None:
        """Write it into a folder, for `load_tokenizer`; the JSON file there is a complete one."""
        make_folder(folder)
        write_atomically(Path(folder, _FILE), self._tokenizer.to_str(pretty=True).encode())
        # Last: where it exists, the other is whole.
        write_description(folder, self._description())

    def _description(self) -> dict[str, Any]:
        return {"kind": _KIND, "special_tokens": self._names}

    def _role(self, token: str) -> str:
        return next(role for role, name in self._names.items() if name == token)


class TokenPart(NamedTuple):
    """Tokens that a dialogue adds to those before: the agent's with the end of its turn.

    >>> TokenPart([15, 3], by_agent=True).tokens
    [15, 3]
    """

    tokens: list[int]
    by_agent: bool


class ChatTokenizer(HFTokenizer):
    """A tokenizer of the `tokenizers` library with a chat template, for dialogues in its format.

    path: a model's local folder, or a JSON file.
    template: None: the folder's.

    The agent's turn ends with the special token that the template writes behind the assistant's
    content, and generation stops there. The other five special tokens of `Tokenizer` have no part
    in dialogues; where one is needed all the same, as for padding, it is one of the model's.

    >>> import tempfile
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = ["hi", "oh", "question", "answer", "</s>", "<pad>", "<user>", "<agent>"]
    >>> theirs = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="hi"))
    >>> theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> theirs.add_special_tokens(words[4:])
    4
    >>> template = ChatTemplate(
    ...     "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<agent>"
    ...     "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    ...     {"pad_token": "<pad>"},
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     theirs.save(f"{folder}/tokenizer.json")
    ...     tokenizer = ChatTokenizer(folder, template)
    >>> chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh"}]
    >>> [part.tokens for part in tokenizer.parts(chat)]
    [[6, 0, 7], [1, 4], []]
    >>> tokenizer.id_to_token(tokenizer.eoa_token_id)
    '</s>'
    """

    def __init__(self, path: str | Path, template: ChatTemplate | None = None) -> None:
        self._tokenizer = _read(Path(path))
        self.template = ChatTemplate.read(path) if template is None else template
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._added = _any_of(token.content for token in added)
        end = self._end_of_turn()
        # What a template must not see in a content: neither tokens nor what stands in for these.
        special = [token.content for token in added if token.special]
        self._unsafe = _any_of([*special, end, _MARK])
        self._add_special([end])
        pad, bos = self._padding(end), self.template.variables.get("bos_token", end)
        # The environment's end and the dialogue's are the template's.
        self._names = {"pad": pad, "eoa": end, "eos": end, "bos": bos, "boa": bos, "eod": end}

    def parts(self, messages: Sequence[Message], *, is_over: bool = True) -> Iterator[TokenPart]:
        """The tokens of a dialogue in parts, the environment's and the agent's in turn.

        is_over: the dialogue has ended; else it ends with the prompt of the agent's next answer.
        """
        contents: dict[str, str] = {}  # those with the characters of special tokens, by stand-ins
        safe: list[Message] = []
        for number, message in enumerate(messages):
            if self._unsafe.search(message["content"]):
                mark = f"{_MARK}{number}\ue001"
                contents[mark], message = message["content"], {**message, "content": mark}
            safe.append(message)
        before = asked = ""  # the special token that ended the last answer; what follows it
        for text, by_agent in self.template.parts(safe, is_over=is_over):
            if not by_agent:
                asked += text
                continue
            end = self._turn_end(text)
            prompt, answer = self._encoded(before, asked, text[:end], contents)
            if answer[-1:] != [self.eoa_token_id]:
                name = self.id_to_token(self.eoa_token_id)
                self._refuse(f"wrote {text!r} for an answer, which does not end with {name}")
            yield TokenPart(prompt, by_agent=False)
            yield TokenPart(answer, by_agent=True)
            before, asked = self._names["eoa"], text[end:]
        yield TokenPart(self._encoded(before, asked, "", contents)[0], by_agent=False)

    def _description(self) -> dict[str, Any]:
        variables = dict(self.template.variables)
        return {"kind": _CHAT_KIND, "chat_template": self.template.source, "variables": variables}

    def _turn_end(self, answer: str) -> int:
        """The position at which the agent's turn ends in the template's text of an answer."""
        found = self._added.finditer(answer)
        return next((one.end() for one in found if one.group() == self._names["eoa"]), len(answer))

    def _encoded(
        self, before: str, prompt: str, answer: str, contents: Mapping[str, str]
    ) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of its answer; stand-ins are contents.

        before: the special token in front of them, if any. It keeps apart what is on its sides, so
            the tokens of a turn are those that it has in the whole dialogue.

        As in `transformers`, both are encoded as one text, unless the prompt has other tokens then,
        or one that reaches into the answer: an answer is generated behind a prompt that was encoded
        without it. So a prompt has the same tokens whatever the answer and later messages are.
        """
        behind, start = int(before != ""), len(before) + len(prompt)
        asked = self._with_contents(before + prompt, contents)
        if not any(mark in prompt or mark in answer for mark in contents):
            found = self._with_specials.encode(before + prompt + answer, add_special_tokens=False)
            num = sum(begin < start for begin, _ in found.offsets)
            if found.ids[:num] == asked and all(end <= start for _, end in found.offsets[:num]):
                return asked[behind:], found.ids[num:]
        return asked[behind:], self._with_contents(answer, contents)

    def _with_contents(self, text: str, contents: Mapping[str, str]) -> list[int]:
        found: list[int] = []
        for piece in re.split(f"({_MARK}\\d+\ue001)", text):
            if piece in contents:
                found += self.encode(contents[piece])
            else:
                found += self._with_specials.encode(piece, add_special_tokens=False).ids
        return found

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        """The tokenizer that takes the names of special tokens for these, as templates do."""
        described = json.loads(self._tokenizer.to_str())
        described["post_processor"] = None  # of byte-level ones it makes offsets shorter
        found = _library().Tokenizer.from_str(json.dumps(described))
        found.encode_special_tokens = False
        return found

    def _end_of_turn(self) -> str:
        """The special token behind the assistant's content; ValueError if it has no such token."""
        ends = []
        for text, by_agent in self.template.parts(_PROBE):
            if not by_agent:
                continue
            head, content, tail = text.partition(_ANSWERED)
            if not content or self._added.search(head):
                self._refuse(
                    f"writes {text!r} for an assistant's message {_ANSWERED!r}: its generation "
                    "prompt (add_generation_prompt) does not lead up to the content"
                )
            end = self._added.search(tail)
            if end is None:
                self._refuse(
                    f"writes {tail!r} behind an assistant's content, in which no special token "
                    "shows where to stop"
                )
            ends.append(end.group())
        return ends[0]

    def _padding(self, end: str) -> str:
        """The token for padding, which is never generated: so not the end of a turn."""
        variables = self.template.variables
        for name in ("pad_token", "bos_token", "unk_token"):
            if variables.get(name, end) != end:
                return variables[name]
        written = set(self._added.findall(self.template.source))
        for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items()):
            if token.content != end and token.content not in written:
                return str(token.content)
        self._refuse(f"leaves no special token for padding besides {end!r}: give it a pad_token")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"the chat template of {self.template.name} {why}. To write dialogues without it: "
            "HFTokenizer(folder, add_missing=True)"
        )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _read(path: Path) -> tokenizers.Tokenizer:
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file}; pass the JSON file of a `tokenizers` tokenizer, or a folder "
            f"with one named {_FILE}. `tokenizer.save_pretrained(folder)` of a fast tokenizer "
            "writes it"
        )
    library = _library()
    with foreign_reader(file, "it is not a tokenizer that `tokenizers` can read"):
        found = library.Tokenizer.from_file(str(file))
    found.no_truncation()
    found.no_padding()
    return found


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "Hugging Face tokenizers need the package tokenizers: pip install 'raffia[text]'"
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
            f"there is no {path}; tokenizer.save(folder) writes it. For a Hugging Face folder: "
            "HFTokenizer(folder)"
        )
    description: Any = parse_json(path, path.read_bytes())
    with foreign_reader(path, "it is damaged, or was not written by save()"):
        kind = description["kind"]
        if kind == _CHAT_KIND:
            variables = {str(k): _text(v) for k, v in description["variables"].items()}
            template = ChatTemplate(_text(description["chat_template"]), variables, str(folder))
            return ChatTokenizer(folder, template)
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
        raise TypeError(f"a token must be a text; got {token!r:.40}")
    token.encode()  # half a surrogate pair is none
    return token
