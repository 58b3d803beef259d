"""Rows of files and lists: the four forms, gzip, Parquet, and errors that name the line."""

import gzip
import json
import tracemalloc

import pytest

from raffia.data.readers import MalformedDataError
from raffia.lm.data.dialogue import (
    Dialogue,
    DialogueDataset,
    JsonLineDialogues,
    ObservationDialogues,
    ParquetDialogues,
    read_dialogues,
)
from raffia.lm.data.dialogue_sources import JoinedDialogues


def assert_refused(source, tokenizer, kind, message, **options):
    with pytest.raises(kind, match=message):
        DialogueDataset.build(source, tokenizer, **options)


MESSAGES = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "lo", "reward": 0.5},
]
SEQUENCE = [["be", None], ["hi", None], ["lo", 0.5]]
TOKENS = [32, 1, 4, 31, 7, 8, 31, 11, 14, 30, 34]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]),
           "value": m["content"], **({"reward": m["reward"]} if "reward" in m else {})}
          for m in MESSAGES]  # fmt: skip
FORMS = {
    "ShareGPT": {"conversations": SHARED},
    "messages": {"messages": MESSAGES},
    "reward of the row": {
        "messages": [*MESSAGES[:2], {"role": "assistant", "content": "lo"}],
        "reward": 0.5,
    },
    "sequence": {"sequence": SEQUENCE, "terminal": True},
    "utterances": {"utterances": ["be", "hi", "lo"], "rewards": [None, None, 0.5]},
    "tokens": {"tokens": TOKENS, "action_idxs": [6, 7, 8], "rewards": [0, 0, 0.5]},
    "null is missing": {"messages": MESSAGES, "reward": None, "terminal": None, "tokens": None},
    "null in messages": {
        "messages": [*MESSAGES[:2], {**MESSAGES[2], "role": None, "from": "gpt", "value": None}]
    },
    "more columns": {"messages": MESSAGES, "id": 7, "split": "train"},
}


def write_lines(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_gzip_and_custom_names(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl.gz"
    row = {"chat": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}
    row |= {"messages": 3, "score": -2}
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    source = read_dialogues(
        path,
        columns={"chat": "messages", "messages": None, "score": "reward"},
        roles={"human": False, "gpt": True},
    )
    assert DialogueDataset.build(source, tokenizer)[0].rewards == [0.0, -2.0]
    lines = "\n".join(json.dumps(FORMS["messages"] | {"id": n}) for n in range(500))
    path.write_bytes(gzip.compress(lines.encode())[:-30])
    with pytest.raises(MalformedDataError, match="the file may be damaged"):
        DialogueDataset.build(read_dialogues(path), tokenizer, malformed="skip")


def test_a_column_that_no_row_has_is_refused(tmp_path, tokenizer):
    """Otherwise its values would be missing silently: all rewards would be 0."""
    columns = {"scroe": "reward", "note": None}
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path, name in zip(paths, ("score", "scroe"), strict=True):
        path.write_text(json.dumps({"prompt": "a", "response": "b", name: 2}) + "\n")
    wrong, right = (read_dialogues(path, columns=columns) for path in paths)
    with pytest.raises(ValueError, match="no row has an entry 'scroe'.* correct its name"):
        DialogueDataset.build(wrong, tokenizer)
    data = DialogueDataset.build(JoinedDialogues([wrong, right]), tokenizer)
    assert [point.episode_return for point in data] == [0.0, 2.0]


def test_parquet(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    names = ("messages", "reward of the row", "utterances", "tokens")
    for name in names:
        rows = [FORMS[name]] * 3
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
        data = DialogueDataset.build(read_dialogues(tmp_path / "a.parquet"), tokenizer)
        assert len(data) == 3
        assert all(point.tokens == TOKENS for point in data)
        assert data[2].rewards == [0.0, 0.0, 0.5]
    rows = [FORMS["messages"], {"messages": [{"role": "robot", "content": "a"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(MalformedDataError, match=r"a.parquet: row 1, 'messages': the role of"):
        DialogueDataset.build(ParquetDialogues(tmp_path / "a.parquet"), tokenizer)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(MalformedDataError, match="the file may be damaged"):
        DialogueDataset.build(ParquetDialogues(tmp_path / "b.parquet"), tokenizer)


USER, AGENT = MESSAGES[1], MESSAGES[2]
BAD = [
    ("[1]", r"it begins with '\[1\]', but must be an object"),
    ({"messages": []}, "'messages': it contains no messages"),
    ({"sequence": []}, "'sequence': it contains no utterances"),
    ({"utterances": [], "rewards": []}, "'utterances': it contains no utterances"),
    (
        {"prompt": "a", "completion": "b"},
        r"'response': nothing, .* \['completion', 'prompt'\]. For a column with another name: colu",
    ),
    (
        {"prompt": "a", "response": "b", "reward": "1"},
        "the reward of utterance 1 is '1', not a number",
    ),
    (
        {"conversations": [{"from": "robot", "value": ""}]},
        "message 0 is 'robot', but known roles are",
    ),
    ("", "it is blank"),
    ('{"messages": [}', "character 15: it is not JSON"),
    ({"conversation": []}, r"it has \['conversation'\]; a row must have one of"),
    ({"messages": [], "sequence": []}, "it has messages and sequence; a row must have one of"),
    ({"messages": MESSAGES, "rewrad": 1}, "'rewrad': did you mean 'reward'"),
    ({"messages": MESSAGES, "rewards": [1]}, "'rewards': it cannot be combined with"),
    ({"messages": "hi"}, "'messages': 'hi', but expected a list of messages"),
    ({"messages": ["hi"]}, "message 0 is 'hi', but must be"),
    (
        {"messages": [{"role": "robot", "content": ""}]},
        "the role of message 0 is 'robot', but known",
    ),
    ({"messages": [{"role": "user"}]}, "the content of message 0 is nothing, not a text"),
    ({"messages": [{"role": "agent", "content": "a", "rewrad": 1}]}, "did you mean 'reward'"),
    ({"messages": [USER | {"reward": 1}]}, "message 0 has a reward and the role 'user'"),
    ({"messages": [AGENT | {"reward": "1"}]}, "the reward of utterance 0 is '1', not a number"),
    ({"messages": [AGENT | {"reward": True}]}, "the reward of utterance 0 is True, not a number"),
    ('{"messages": [{"role": "agent", "content": "a", "reward": 1e999}]}', "is not finite"),
    ({"messages": MESSAGES, "reward": 1}, "but its messages have rewards: give one or"),
    ({"messages": [USER], "reward": 1}, "none of its messages is the agent's"),
    ({"messages": MESSAGES, "terminal": 1}, "'terminal': 1, but expected true or false"),
    ({"sequence": [["a"]]}, r"utterance 0 is \['a'\]; a sequence must be a list of pairs"),
    ({"sequence": [["a", []]]}, r"the reward of utterance 0 is \[\], not a number"),
    ({"utterances": ["a", "b"], "rewards": [1]}, "'rewards': there are 1 rewards for 2 utterances"),
    ({"utterances": ["a"]}, "'rewards': nothing, but expected a list of numbers"),
    ({"tokens": [1, 2], "action_idxs": [0], "rewards": [1, 2]}, "2 rewards for 1 action_idxs"),
    ({"tokens": [1, 99], "action_idxs": [0], "rewards": [1]}, "token 1 of the row is 99, but the"),
    ({"tokens": [1, -1], "action_idxs": [0], "rewards": [1]}, "token 1 of the row is -1, but the"),
    ({"tokens": [1, 2], "action_idxs": [1], "rewards": [1]}, "must be increasing and lie in 0..0"),
    ({"tokens": [1.5], "action_idxs": [], "rewards": []}, "expected a list of whole numbers"),
    ({"tokens": [], "action_idxs": [], "rewards": []}, "a row must have at least one token"),
    ({"sequence": [["A", None]]}, "line 2: the tokenizer has no token for part of it: 'A'"),
    ({"sequence": [["a</s>", None]]}, "contains the eos token"),
    ({"sequence": [["a\ud800", None]]}, r"0 contains half of a surrogate pair: 'a.ud800'"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_malformed_rows_are_refused_with_their_line_or_left_out(tmp_path, tokenizer, row, message):
    path = write_lines(tmp_path / "a.jsonl", FORMS["messages"], row, FORMS["tokens"])
    with pytest.raises(MalformedDataError, match=message) as found:
        DialogueDataset.build(read_dialogues(path), tokenizer)
    assert str(found.value).startswith(f"{path}: line 2")
    data = DialogueDataset.build(read_dialogues(path), tokenizer, malformed="skip")
    assert [point.tokens for point in data] == [TOKENS, TOKENS]
    assert data.statistics().num_skipped == 1
    assert data.store.report.reasons[0] == str(found.value)


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_file_that_is_one_list(tmp_path, tokenizer, ending):
    path = tmp_path / f"a{ending}"
    text = json.dumps([FORMS["messages"], MESSAGES, {"conversations": SHARED}], indent=2).encode()
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    data = DialogueDataset.build(read_dialogues(path), tokenizer)
    assert [point.tokens for point in data] == [TOKENS] * 3
    for content, message in (
        (json.dumps([FORMS["messages"], 7]).encode(), "row 1: 7 must be an object"),
        (b'[{"messages": ', "begins like a list, but is not JSON"),
        (b'["\xff"]', "byte 3: it is not UTF-8"),
    ):
        path.write_bytes(content)
        assert_refused(read_dialogues(path), tokenizer, MalformedDataError, message)
    path.write_text(json.dumps([FORMS["messages"], 7]))
    assert len(DialogueDataset.build(read_dialogues(path), tokenizer, malformed="skip")) == 1
    path.write_text("[1, 2, 3, 4]")
    with pytest.raises(MalformedDataError, match="a single list of more than 8 bytes"):
        list(JsonLineDialogues(path, max_line_bytes=8).rows())


def test_a_line_or_a_row_that_is_too_long(tmp_path, tokenizer):
    """A long line is skipped as a whole; a long row may be cut."""
    long = json.dumps({"sequence": [["a" * 3_000_000, None]]})
    path = write_lines(tmp_path / "a.jsonl", FORMS["sequence"], long, FORMS["sequence"])
    source, error = JsonLineDialogues(path, max_line_bytes=1000), MalformedDataError
    assert_refused(source, tokenizer, error, "line 2: it is longer than 1000 bytes")
    data = DialogueDataset.build(source, tokenizer, malformed="skip")
    assert len(data) == 2 and data.statistics().num_skipped == 1
    path = write_lines(tmp_path / "b.jsonl", {"sequence": [["a", 1.0]]}, FORMS["sequence"])
    source, message = read_dialogues(path), "line 2: it has 11 tokens, more than the 8 of"
    assert_refused(source, tokenizer, error, message, max_len=8)
    cut = DialogueDataset.build(source, tokenizer, max_len=8, too_long="cut")
    assert cut[1].tokens == TOKENS[:8] and cut[1].terminals == [0, 0]
    assert cut.statistics().num_cut == 1
    assert cut.statistics().mean_return == 0.75, "the return is that of the whole row"
    skipped = DialogueDataset.build(source, tokenizer, max_len=8, too_long="skip")
    assert len(skipped) == 1 and skipped.statistics().num_skipped == 1


def test_sources_without_rows_and_other_objects_are_refused(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", "no")
    message = "no row is left to learn from: all 1 were skipped, the first"
    assert_refused(read_dialogues(path), tokenizer, ValueError, message, malformed="skip")
    path.write_text("")
    empty, hi = read_dialogues(path), [Dialogue([("hi", None)], True)]
    not_a_source = r"not a source of dialogues: pass read_dialogues\(path\)"
    mixed = ObservationDialogues([Dialogue(SEQUENCE), "no"])
    assert_refused(empty, tokenizer, ValueError, "no rows to learn from: the source is empty")
    assert_refused(empty, tokenizer, ValueError, "='shorten' must be one of", too_long="shorten")
    assert_refused("chats.jsonl", tokenizer, TypeError, not_a_source)
    assert_refused(hi, tokenizer, TypeError, not_a_source)
    assert_refused(mixed, tokenizer, MalformedDataError, r"row 1: a str has no to_sequence\(\)")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_dialogues(tmp_path / "none.jsonl")


@pytest.mark.parametrize("name", ["line.json.gz", "list.json.gz", "a.parquet"])
def test_a_small_file_that_needs_a_lot_of_memory_is_refused(tmp_path, tokenizer, name):
    path, text = tmp_path / name, "A" * 2**25  # for which there is no token
    if name == "a.parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pa.table({"utterances": [[text]], "rewards": [[1.0]]})
        pq.write_table(table, path, compression="zstd")
    else:
        row = json.dumps({"utterances": [text], "rewards": [1.0]})
        path.write_bytes(gzip.compress((row if "line" in name else f"[\n{row}]").encode()))
    tracemalloc.start()
    with pytest.raises(MalformedDataError, match="a small file that needs a lot of memory"):
        DialogueDataset.build(read_dialogues(path), tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size < 2**16 and peak < 2**26
