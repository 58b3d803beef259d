"""What `benchmarks.ilql` times: sizes, dialogues and prompts, the same for every package.

This file imports nothing but the standard library: it runs in every package's environment.
"""

import random
from dataclasses import dataclass

from benchmarks.search_worker import Case


@dataclass(frozen=True)
class Size:
    """A language model's shape, and the batch that it is trained on."""

    num_layers: int
    num_heads: int
    width: int
    vocab_size: int
    block_size: int
    rows: int
    longest: int  # tokens of a row, padding and all
    tokens: int  # of all rows, without padding
    new: int  # of a text, behind its prompt


SIZES = {
    "small": Size(4, 4, 128, 35, 128, rows=32, longest=74, tokens=1840, new=100),
    "gpt2": Size(12, 12, 768, 50257, 1024, rows=1, longest=128, tokens=128, new=16),
    "gpt2 many": Size(12, 12, 768, 50257, 1024, rows=16, longest=256, tokens=3072, new=64),
}
PROMPT = 6  # tokens
NUM_SPECIAL = 6  # tokens 0..5: padding, <s>, </s>, <a>, </a>, </eod>
UTTERANCE = 6  # tokens: the agent's and the environment's take turns
ALPHA, LEARNING_RATE, CQL_WEIGHT = 0.005, 1e-4, 0.01


@dataclass(frozen=True)
class Dialogue:
    """A row; positions of actions are those before the agent's tokens.

    >>> dialogues("small")[0].states[-1] == SIZES["small"].longest - 1
    True
    """

    tokens: list[int]
    actions: list[int]
    rewards: list[float]  # behind each action

    @property
    def states(self) -> list[int]:
        """The actions' positions, and that of the last state."""
        return [*self.actions, len(self.tokens) - 1]


def dialogues(model: str) -> list[Dialogue]:
    """A batch of noise: the same in every process.

    >>> sum(len(dialogue.tokens) for dialogue in dialogues("small"))
    1840
    """
    size, draws = SIZES[model], random.Random(0)
    least = size.longest // 2
    lengths = [draws.randint(least, size.longest) for _ in range(size.rows)]
    lengths[0] = size.longest
    while missing := size.tokens - sum(lengths):
        row = draws.randrange(size.rows)
        moved = lengths[row] + (1 if missing > 0 else -1)
        if row and least <= moved <= size.longest:
            lengths[row] = moved
    found = []
    for length in lengths:
        tokens = [draws.randrange(NUM_SPECIAL, size.vocab_size) for _ in range(length)]
        actions = [at for at in range(length - 1) if at // UTTERANCE % 2 == 0]
        ends = [at % UTTERANCE == UTTERANCE - 1 for at in actions]
        found.append(Dialogue(tokens, actions, [-1.0 if end else 0.0 for end in ends]))
    return found


def prompts(model: str, num: int) -> list[list[int]]:
    """Prompts of noise.

    >>> [len(prompt) for prompt in prompts("small", 2)]
    [6, 6]
    """
    draws = random.Random(1)
    words = range(NUM_SPECIAL, SIZES[model].vocab_size)
    return [draws.choices(words, k=PROMPT) for _ in range(num)]


def training(model: str, arrangement: str) -> Case:
    """An update. arrangement: "three trunks", which is the peer's, or "shared", our default.

    >>> training("small", "shared").policy
    'train, shared'
    """
    return Case(model, SIZES[model].rows, 0, 0, policy=f"train, {arrangement}")


def generation(
    model: str, num_prompts: int, beams: int = 0, arrangement: str = "shared", top_k: int = 0
) -> Case:
    """Texts behind prompts; beams 0: sampled; top_k 0: of all tokens. Of training cases the fields
    are named for searches: "simulations" are beams here, "actions" is top_k.

    >>> generation("small", 8, beams=4).policy
    'generate, shared'
    """
    return Case(model, num_prompts, beams, top_k, policy=f"generate, {arrangement}")


def flops(case: Case) -> float:
    """The products and sums that a call of ours can't do without: a multiply-add counts twice.

    Trunk passes, a backward pass counted as two forward ones, the last layer behind its attention
    where heads look only; attention to the tokens before only; heads where there are actions. Of a
    text: each token once.

    >>> round(flops(training("small", "shared")) / 1e9, 1)
    9.1
    """
    size, shared = SIZES[case.model], case.policy.endswith("shared")
    d, layers, words = size.width, size.num_layers, size.vocab_size
    per_token, pair = 24 * d * d * layers, 4 * d * layers  # of a trunk; of two tokens' attention
    v, q, logits = 2 * (2 * d * d + 2 * d), 2 * (2 * d * d + 2 * d * words), 2 * d * words
    if case.policy.startswith("train"):
        rows = dialogues(case.model)
        num_actions = sum(len(row.actions) for row in rows)
        pairs = sum(len(row.tokens) * (len(row.tokens) + 1) / 2 for row in rows)
        unseen = size.tokens - num_actions - size.rows  # by any head
        trunk = per_token * size.tokens - 18 * d * d * unseen + pair * pairs
        passes = 3 if shared else 7
        heads = 3 * (v * (num_actions + size.rows) + (2 * q + logits) * num_actions)
        return passes * trunk + heads + 2 * v * num_actions  # target Q of the actions alone
    texts = case.batch * max(1, case.simulations)
    length = PROMPT + size.new - 1
    read = case.batch * PROMPT + texts * (size.new - 1)
    pairs = texts * length * (length + 1) / 2
    trunks = (1 if shared else 3) * (per_token * read + pair * pairs)
    return trunks + texts * size.new * (v + 2 * q + logits)
