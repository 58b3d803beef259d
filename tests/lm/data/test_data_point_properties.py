"""Any dialogue as a row of tokens: against the definition of the decision process, written out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue import Dialogue, DialogueDataset, SpecifiedTokenReward, Vocabulary

from .conftest import LETTERS, MARKS, LetterTokenizer

TOKENIZER = LetterTokenizer(LETTERS + MARKS)
BOS, BOA, EOS, EOA, EOD = 32, 33, 31, 30, 34
rewards = st.none() | st.sampled_from([0.0, -1.0, 0.5, -0.25, 3.0])
utterances = st.tuples(st.sampled_from(["", "a", "bc", "cab", "<g><b>"]), rewards)
sequences = st.lists(utterances, max_size=7)
table = st.dictionaries(st.sampled_from([0, 1, 2, 30]), st.sampled_from([-1.0, 0.25]))


@given(sequences, st.booleans(), table, st.none() | st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_a_row_is_what_the_definition_says(sequence, terminal, reward_of_token, max_len):
    reward = SpecifiedTokenReward(reward_of_token)
    point = DataPoint.from_obs(Dialogue(sequence, terminal), TOKENIZER, reward, max_len=max_len)
    tokens, decided, earned, said, totals = [], [], [], [], []
    begins = sequence and sequence[0][1] is None
    tokens.append(BOS if begins else BOA)
    for text, own in sequence:
        start = len(tokens) - 1
        tokens += [*TOKENIZER.encode(text), EOS if own is None else EOA]
        if own is not None:
            places = range(start, len(tokens) - 1)
            gains = [reward_of_token.get(tokens[place + 1], 0.0) for place in places]
            gains[-1] += own
            decided += places
            earned += gains
            said.append((start, len(tokens) - 1))
            totals.append(sum(gains))
    tokens += [EOD] * terminal
    last = len(tokens) - 1
    assert point.episode_return == pytest.approx(sum(earned))
    length = len(tokens) if max_len is None else min(len(tokens), max_len)
    assert point.tokens == tokens[:length]
    assert point.was_cut == (length <= last)
    # An action counts if the state behind it is there; the last state has none behind it.
    following = [*decided[1:], last]
    num = sum(after < length for after in following[: len(decided)])
    assert point.action_idxs == decided[:num]
    assert point.rewards == pytest.approx(earned[:num])
    assert point.terminals == [0] * num + [int(terminal and not point.was_cut)]
    assert point.state_idxs[:-1] == point.action_idxs
    assert all(place < length for place in point.state_idxs)
    if not point.was_cut:
        assert point.state_idxs[-1] == last
    elif num < len(decided) and decided[num] < length:
        assert point.state_idxs[-1] == decided[num]  # from there it would go on
    begins_of = [start for start, _ in said]
    after_utterance = [*begins_of[1:], last][: len(said)]
    whole = sum(after < length for after in after_utterance)
    assert point.utterance_action_idxs == [end for _, end in said[:whole]]
    assert point.utterance_state_idxs[:-1] == begins_of[:whole]
    assert point.utterance_rewards == pytest.approx(totals[:whole])
    if not point.was_cut:
        assert point.utterance_state_idxs[-1] == last


@given(sequences, st.booleans())
@settings(max_examples=100, deadline=None)
def test_rows_of_tokens_and_of_texts_agree(sequence, terminal):
    point = DataPoint.from_obs(Dialogue(sequence, terminal), TOKENIZER)
    again = DataPoint.from_tokens(
        point.tokens, point.action_idxs, point.rewards, terminal=terminal, end_of_action=EOA
    )
    assert again == point


@given(
    st.lists(st.tuples(sequences, st.booleans(), st.none() | st.integers(1, 20)), min_size=1),
    st.booleans(),
    st.sampled_from([(), (4, 16, 64)]),
)
@settings(max_examples=100, deadline=None)
def test_a_batch_holds_its_rows(dialogues, per_token, buckets):
    points = [
        DataPoint.from_obs(Dialogue(sequence, terminal), TOKENIZER, max_len=max_len)
        for sequence, terminal, max_len in dialogues
    ]
    data = DialogueDataset.of_points(points, Vocabulary(35, pad_token_id=29), buckets=buckets)
    batch = data.collate(points, per_token=per_token)
    for at, point in enumerate(points):
        states = point.state_idxs if per_token else point.utterance_state_idxs
        actions = point.action_idxs if per_token else point.utterance_action_idxs
        gains = point.rewards if per_token else point.utterance_rewards
        num, length = len(actions), len(point.tokens)
        assert batch["tokens"][at, :length].tolist() == point.tokens
        assert (batch["tokens"][at, length:] == 29).all()
        assert batch["attn_mask"][at].nonzero().flatten().tolist() == list(range(length))
        for name, wanted, filler in (
            ("action_idxs", actions, 0),
            ("state_idxs", states, 0),
            ("rewards", gains, 0),
            ("terminals", [0] * num + point.terminals[-1:], 1),
            ("action_mask", [1] * num, 0),
        ):
            found = batch[name][at].tolist()
            assert found[: len(wanted)] == pytest.approx(wanted)
            assert all(value == filler for value in found[len(wanted) :])
        # What is behind an action tells the real ones
        assert (batch["state_idxs"][at, 1:] > 0).tolist() == batch["action_mask"][at].tolist()
