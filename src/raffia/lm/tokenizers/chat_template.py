"""A model's own chat template: messages as text, of which one knows whose each part is.

A template is Jinja code from a model's folder, by which `transformers` writes the messages of a
chat as one text. It is rendered message by message: what is added up to the end of the generation
prompt is the environment's, what the next message then adds is the agent's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from raffia.files import foreign_reader, parse_json, shown

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
AGENT, OTHER = "assistant", "user"  # the roles that every template knows
TEMPLATE_ROLES = ("system", "tool")  # of the others, those whose names templates may know
# Special tokens that templates may write.
VARIABLES = tuple(f"{name}_token" for name in "bos eos unk pad sep cls mask".split())
Message = Mapping[str, str]  # {"role": ..., "content": ...}


class Part(NamedTuple):
    """A text that a dialogue adds to the one before.

    >>> Part("hello<|im_end|>", by_agent=True).text
    'hello<|im_end|>'
    """

    text: str
    by_agent: bool


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja code of a template, with the special tokens that it may write.

    source: the code. It runs in Jinja's sandbox, as a folder may come from a stranger.
    variables: names in the code -> special tokens: {"bos_token": "<s>"}.
    name: where it was found, for errors.

    >>> source = (
    ...     "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    ...     "{% if add_generation_prompt %}<assistant>{% endif %}"
    ... )
    >>> template = ChatTemplate(source)
    >>> hi = {"role": "user", "content": "hi"}
    >>> template.render([hi], add_generation_prompt=True)
    '<user>hi</s><assistant>'
    >>> [part.text for part in template.parts([hi, {"role": "assistant", "content": "oh"}])]
    ['<user>hi</s><assistant>', 'oh</s>', '']
    """

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = field(default="the tokenizer", compare=False)

    @classmethod
    def read(cls, folder: str | Path) -> ChatTemplate:
        """The template of a model's folder; FileNotFoundError if it has none."""
        folder = Path(folder)
        path = folder / CONFIG_FILE
        config: Any = parse_json(path, path.read_bytes()) if path.is_file() else {}
        with foreign_reader(path, "its entries are not those of a tokenizer of transformers"):
            source = config.get("chat_template")
            if isinstance(source, list):  # several, by name
                source = {one["name"]: one["template"] for one in source}["default"]
            tokens = {name: _token(config.get(name)) for name in VARIABLES}
        if (folder / TEMPLATE_FILE).is_file():
            source = (folder / TEMPLATE_FILE).read_text("utf-8")
        if not isinstance(source, str):
            raise FileNotFoundError(
                f"{folder} has no chat template, neither {TEMPLATE_FILE} nor an entry of "
                f"{CONFIG_FILE}"
            )
        return cls(source, {name: text for name, text in tokens.items() if text}, str(folder))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of messages; ValueError, with its reason, where the template refuses them."""
        import jinja2

        try:
            return _compiled(self.source).render(
                messages=[dict(message) for message in messages],
                tools=None,  # `transformers` names these two always: templates ask if they are None
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template of {self.name} cannot write messages of {roles or 'nobody'}: "
                f"{error}"
            ) from error

    def parts(self, messages: Sequence[Message], *, is_over: bool = True) -> Iterator[Part]:
        """The text in parts, the environment's and the agent's in turn.

        is_over: the dialogue has ended; else its text ends with the prompt of the next answer.
        Raises ValueError where a later message changes the text before it.
        """
        done = ""
        for number, message in enumerate(messages):
            if message["role"] == AGENT:
                prompt = self._longer(messages[:number], done, add_generation_prompt=True)
                whole = self._longer(messages[: number + 1], prompt)
                yield Part(prompt[len(done) :], by_agent=False)
                yield Part(whole[len(prompt) :], by_agent=True)
                done = whole
        whole = self._longer(messages, done, add_generation_prompt=not is_over)
        yield Part(whole[len(done) :], by_agent=False)

    def _longer(
        self, messages: Sequence[Message], before: str, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of messages, which begins with that of those before."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        if not text.startswith(before):
            pairs = enumerate(zip(before, text, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(before), len(text)))
            raise ValueError(
                f"the chat template of {self.name} cannot be used for learning, because a message "
                f"changes the text before it: {shown(before[at:])} became {shown(text[at:])} with "
                f"message {len(messages) - 1}. Take a template that only adds text, or none, as "
                "HFTokenizer(folder, add_missing=True) does"
            )
        return text


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """The template, compiled as by `transformers`, with the functions that templates use."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the agent's tokens; they are found without it here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment.from_string(source)


def _token(entry: Any) -> str | None:
    """A special token, given as a text or as an object with its content."""
    return entry["content"] if isinstance(entry, dict) else entry


def chat_role(role: str, by_agent: bool) -> str:
    """The role in a template of a role in data, of which is known whether it is the agent's.

    >>> chat_role("gpt", True), chat_role("human", False), chat_role("system", False)
    ('assistant', 'user', 'system')
    """
    if by_agent:
        return AGENT
    return role if role in TEMPLATE_ROLES else OTHER
