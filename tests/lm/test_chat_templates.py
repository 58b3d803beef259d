"""Dialogues by a tokenizer's own chat template: the same tokens as transformers, and roles."""

import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raffia.files import DamagedFileError
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue import DialogueDataset, TranscriptDialogues
from raffia.lm.data.dialogue_rows import Dialogue
from raffia.lm.tokenizers.chat_template import ChatTemplate
from raffia.lm.tokenizers.hf_tokenizer import ChatTokenizer, load_tokenizer
from raffia.lm.tokenizers.tokenizer import tokenizer_checksum
from raffia.lm.transformers_files import save_for_transformers
from tests.lm.chat_models import CHATML, TEMPLATES, write_tokenizer

TURNS = [
    ("system", "be brief"),
    ("user", "how are you?"),
    ("assistant", "well, thanks", 0.5),
    ("user", " and\nyou é "),
    ("assistant", "so so", -1.0),
]

CHAT = [dict(zip(("role", "content", "reward"), turn, strict=False)) for turn in TURNS]
BARE = [{"role": role, "content": content} for role, content, *_ in TURNS]


@pytest.fixture(params=TEMPLATES)
def home(request, tmp_path):
    return write_tokenizer(tmp_path / request.param, request.param)


def row_of(chat, tokenizer, **options):
    return DialogueDataset.build(TranscriptDialogues([chat]), tokenizer, **options)[0]


def agent_texts(point, tokenizer):
    """The texts of the agent's utterances, special tokens included."""
    decode = tokenizer._tokenizer.decode
    spans = zip(point.utterance_state_idxs[:-1], point.utterance_action_idxs, strict=True)
    return [decode(point.tokens[a + 1 : b + 1], skip_special_tokens=False) for a, b in spans]


def test_rows_are_the_tokens_of_transformers_and_the_agents_are_actions(home):
    transformers = pytest.importorskip("transformers")
    their, ours = transformers.AutoTokenizer.from_pretrained(home), ChatTokenizer(home)
    row = row_of(CHAT, ours)
    assert row.tokens == their.apply_chat_template(BARE, return_dict=False)
    end = ours.id_to_token(ours.eoa_token_id)
    blank = " " if home.name == "llama-2" else ""  # its template writes one
    assert agent_texts(row, ours) == [f"well, thanks{blank}{end}", f"so so{blank}{end}"]
    assert row.utterance_rewards == [0.5, -1.0]
    assert row.terminals[-1] == 1 and sum(map(bool, row.rewards)) == 2
    pairs = zip(row.action_idxs, row.rewards, strict=True)
    assert {row.tokens[index + 1] for index, reward in pairs if reward} == {ours.eoa_token_id}
    for num in (2, 4):
        utterances = [(content, *(reward or [None])) for _, content, *reward in TURNS[:num]]
        roles = [role for role, *_ in TURNS[:num]]
        prompt = DataPoint.from_obs(Dialogue(utterances, terminal=False, roles=roles), ours)
        assert prompt.tokens == row.tokens[: len(prompt.tokens)] and not prompt.terminal
        options = {"add_generation_prompt": True, "return_dict": False}
        assert prompt.tokens == their.apply_chat_template(BARE[:num], **options)
        assert len(prompt.tokens) - 1 in row.action_idxs  # the state of the first token


def test_special_tokens_in_texts_are_encoded_as_plain_text(home):
    ours = ChatTokenizer(home)
    end = ours.id_to_token(ours.eoa_token_id)
    texts = [f"say {end}", f"{end} so"]
    row = row_of(
        [{"role": CHAT[index]["role"], "content": texts[index - 1]} for index in (1, 2)], ours
    )
    turns = 1 if home.name == "llama-2" else 2  # that the template ends
    assert row.tokens.count(ours.eoa_token_id) == turns and len(row.utterance_rewards) == 1
    text = ours._tokenizer.decode(row.tokens, skip_special_tokens=False)
    assert all(content in text for content in texts)
    (text,) = agent_texts(row, ours)
    assert text.split() == f"{end} so{' ' * (home.name == 'llama-2')}{end}".split()


def test_a_saved_tokenizer_is_loaded_with_its_template_in_the_checksum(home, tmp_path):
    ours = ChatTokenizer(home)
    save_for_transformers(ours, tmp_path / "out", max_length=64)
    for other in (load_tokenizer(tmp_path / "out"), ChatTokenizer(tmp_path / "out")):
        assert tokenizer_checksum(other) == tokenizer_checksum(ours)
        assert row_of(CHAT, other) == row_of(CHAT, ours)
    longer = ChatTemplate(ours.template.source + "{# #}", ours.template.variables)
    assert tokenizer_checksum(ChatTokenizer(home, longer)) != tokenizer_checksum(ours)
    transformers = pytest.importorskip("transformers")
    their = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert their.apply_chat_template(BARE, return_dict=False) == row_of(CHAT, ours).tokens
    path = tmp_path / "out" / "raffia_tokenizer.json"
    path.write_text(path.read_text().replace('"variables"', '"variable"'))
    with pytest.raises(DamagedFileError, match="damaged"):
        load_tokenizer(tmp_path / "out")


TOOLS = (
    "{% if tools is not none %}tools: {% endif %}{% if documents is none %}{{ sep_token }}"
    "{{ {'é': 1} | tojson(ensure_ascii=False) }}{% endif %}"
)


def test_a_template_gets_the_variables_of_transformers_and_may_be_one_of_several(tmp_path):
    transformers = pytest.importorskip("transformers")
    home = write_tokenizer(tmp_path / "tools", "chatml")
    (home / "chat_template.jinja").write_text(TOOLS + CHATML)
    path = home / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sep_token": "<|pad|>"}))
    text = ChatTemplate.read(home).render(BARE)
    assert text.startswith('<|pad|>{"é": 1}<|im_start|>')
    their = transformers.AutoTokenizer.from_pretrained(home)
    assert text == their.apply_chat_template(BARE, tokenize=False)
    home = write_tokenizer(tmp_path / "several", "chatml")
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": marked}]
    config = {"chat_template": named, "pad_token": {"content": "<|pad|>"}}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    ours = ChatTokenizer(home)
    assert row_of(CHAT, ours) == row_of(CHAT, ChatTokenizer(home, ChatTemplate(CHATML)))


def test_only_contents_with_special_tokens_are_replaced_for_the_template(tmp_path):
    home = write_tokenizer(tmp_path, "chatml")
    theirs = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
    theirs.add_tokens(["</think>"])  # known, but not special
    theirs.save(str(home / "tokenizer.json"))
    last = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    ours = ChatTokenizer(home, ChatTemplate(last))
    chats = [[("hi", None), (reply, 1.0)] for reply in ("x</think>so", "so")]
    first, second = (DataPoint.from_obs(Dialogue(chat), ours) for chat in chats)
    assert first == second
    # The characters of a placeholder may occur in a content, too.
    chat = [("<|im_end|>", None), ("\ue0000\ue001", 1.0)]
    row = DataPoint.from_obs(Dialogue(chat), ours)
    begin, end = row.utterance_state_idxs[0], row.utterance_action_idxs[0]
    assert ours.decode(row.tokens[begin + 1 : end]) == chat[1][0]


UNSTABLE = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
NO_PROMPT = CHATML.partition("{% if add")[0]
NO_END = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)
FLAWS = {
    "unstable": (UNSTABLE, ["chat template of here", "changes the text before it", "'question"]),
    "no prompt": (NO_PROMPT, ["chat template of here", "does not lead up to the content"]),
    "no end": (NO_END, ["chat template of here", "no special token shows where to stop"]),
    "no content": ("<|im_start|>", ["writes '' for an assistant's message 'answer'"]),
    "no Jinja": ("{% for m in %}", ["the chat template of here cannot write messages of user"]),
    "unsafe": ("{{ messages.append(1) }}", ["cannot write messages", "unsafe"]),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_templates_without_separable_turns_are_refused(flaw, tmp_path):
    source, parts = FLAWS[flaw]
    with pytest.raises(ValueError) as caught:
        ChatTokenizer(write_tokenizer(tmp_path, "chatml"), ChatTemplate(source, name="here"))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_dialogues_that_a_template_refuses_are_malformed_rows(tmp_path):
    home = write_tokenizer(tmp_path, "chatml")
    ours = ChatTokenizer(home, ChatTemplate(ALTERNATE, name="here"))
    pairs = [m for m in CHAT if m["role"] != "system"]
    source = TranscriptDialogues([pairs, CHAT])
    with pytest.raises(ValueError, match=r"row 1: .* of here .* system, .* roles must alternate"):
        DialogueDataset.build(source, ours)
    assert len(DialogueDataset.build(source, ours, malformed="skip")) == 1
    with pytest.raises(ValueError, match="1 roles for 0 utterances"):
        DataPoint.from_obs(Dialogue([], roles=["user"]), ours)
    with pytest.raises(FileNotFoundError, match="has no chat template"):
        ChatTokenizer(write_tokenizer(tmp_path / "bare", None))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_prompt_is_a_prefix_of_its_row_for_any_texts(kind, tmp_path_factory):
    ours = ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("chat"), kind))
    text = st.text("ab \n<|é/s>", max_size=8)

    @given(st.lists(st.tuples(text, text), min_size=1, max_size=3))
    @example([("", ""), ("", "<s>")])  # later messages do not change the first answer
    @settings(deadline=None, max_examples=40)
    def check(pairs):
        sequence = [turn for question, reply in pairs for turn in ((question, None), (reply, 1.0))]
        row = DataPoint.from_obs(Dialogue(sequence), ours)
        assert len(row.utterance_rewards) == len(pairs)
        for num in range(len(pairs)):
            prompt = DataPoint.from_obs(Dialogue(sequence[: 2 * num + 1], terminal=False), ours)
            assert prompt.tokens == row.tokens[: row.utterance_state_idxs[num] + 1]

    check()


# Line feeds of both sides merge, or those of the prompt do unless an answer follows: so GPT-2's.
@pytest.mark.parametrize(("by_words", "trained"), [(False, "t\n\nso"), (True, "t\n\n")])
def test_a_prompts_tokens_do_not_depend_on_its_answer(by_words, trained, tmp_path):
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    theirs.pre_tokenizer = pieces
    trainer = tokenizers.trainers.BpeTrainer(
        initial_alphabet=pieces.alphabet(), special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"]
    )
    theirs.train_from_iterator([trained] * 3, trainer)
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert len(theirs.encode(trained).ids) == 1 + by_words
    ours = ChatTokenizer(tmp_path, ChatTemplate(CHATML.replace("\n", "\n" * (1 + by_words))))
    row = DataPoint.from_obs(Dialogue([("hi", None), ("\nso"[by_words:], 1.0)]), ours)
    prompt = DataPoint.from_obs(Dialogue([("hi", None)], terminal=False), ours)
    assert prompt.tokens == row.tokens[: row.action_idxs[0] + 1]
