"""Any dialogue as a row of tokens: against the definition of the decision process in Python."""

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
def test_a_row_agrees_with_the_definition(sequence, terminal, reward_of_token, max_len):
    reward = SpecifiedTokenReward(reward_of_token)
    point = DataPoint.from_obs(Dialogue(sequence, terminal), TOKENIZER, reward, max_len=max_len)
    tokens, positions, rewards_by_token, spans, totals = [], [], [], [], []
    user_begins = sequence and sequence[0][1] is None
    tokens.append(BOS if user_begins else BOA)
    for text, reward_of_utterance in sequence:
        start = len(tokens) - 1
        tokens += [*TOKENIZER.encode(text), EOS if reward_of_utterance is None else EOA]
        if reward_of_utterance is not None:
            indices = range(start, len(tokens) - 1)
            gains = [reward_of_token.get(tokens[index + 1], 0.0) for index in indices]
            gains[-1] += reward_of_utterance
            positions += indices
            rewards_by_token += gains
            spans.append((start, len(tokens) - 1))
            totals.append(sum(gains))
    tokens += [EOD] * terminal
    last = len(tokens) - 1
    assert point.episode_return == pytest.approx(sum(rewards_by_token))
    length = len(tokens) if max_len is None else min(len(tokens), max_len)
    assert point.tokens == tokens[:length]
    assert point.was_cut == (length <= last)
    # An action counts if the state after it is in the row; the last state is followed by none.
    following = [*positions[1:], last]
    num = sum(after < length for after in following[: len(positions)])
    assert point.action_idxs == positions[:num]
    assert point.rewards == pytest.approx(rewards_by_token[:num])
    assert point.terminals == [0] * num + [int(terminal and not point.was_cut)]
    assert point.state_idxs[:-1] == point.action_idxs
    assert all(index < length for index in point.state_idxs)
    if not point.was_cut:
        assert point.state_idxs[-1] == last
    elif num < len(positions) and positions[num] < length:
        assert point.state_idxs[-1] == positions[num]  # the state where the row was cut
    starts = [start for start, _ in spans]
    after_utterance = [*starts[1:], last][: len(spans)]
    num_utterances = sum(after < length for after in after_utterance)
    assert point.utterance_action_idxs == [end for _, end in spans[:num_utterances]]
    assert point.utterance_state_idxs[:-1] == starts[:num_utterances]
    assert point.utterance_rewards == pytest.approx(totals[:num_utterances])
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
    for index, point in enumerate(points):
        states = point.state_idxs if per_token else point.utterance_state_idxs
        actions = point.action_idxs if per_token else point.utterance_action_idxs
        gains = point.rewards if per_token else point.utterance_rewards
        num, length = len(actions), len(point.tokens)
        assert batch["tokens"][index, :length].tolist() == point.tokens
        assert (batch["tokens"][index, length:] == 29).all()
        assert batch["attn_mask"][index].nonzero().flatten().tolist() == list(range(length))
        for name, expected, filler in (
            ("action_idxs", actions, 0),
            ("state_idxs", states, 0),
            ("rewards", gains, 0),
            ("terminals", [0] * num + point.terminals[-1:], 1),
            ("action_mask", [1] * num, 0),
        ):
            found = batch[name][index].tolist()
            assert found[: len(expected)] == pytest.approx(expected)
            assert all(value == filler for value in found[len(expected) :])
        # The state after an action tells the real actions
        assert (batch["state_idxs"][index, 1:] > 0).tolist() == batch["action_mask"][index].tolist()
