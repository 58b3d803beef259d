"""The record of all arrays and numbers that the kernels of a search read and write, by name."""

from raffia.jit.records import F32s, F64s, I32s, I64s, Record, U8s, fields_at

PUCT, GUMBEL = 0, 1  # kind
RUNNING, TREE, SIBLINGS = 0, 1, 2  # normalize


class SearchRecord(Record):
    """The arrays and options of a search; arrays that it does not use are left out.

    B roots, N nodes of each, A actions. An array's row of a node is `root * N + node`.
    """

    # entries of the tree, see raffia.search.tree
    visits: I32s
    value_sum: F64s
    raw_value: F32s
    reward: F32s
    discount: F32s
    parent: I32s
    action: I32s
    depth: I32s
    ended: U8s
    children: I32s
    children_visits: I32s
    children_q: F32s
    prior: F32s
    num_tried: I32s
    q_sum: F64s
    q_min: F32s
    q_max: F32s
    mask: U8s
    prior_logits: F32s
    to_play: I32s
    value_prefix: F32s
    key: I64s
    canonical: I32s
    # of the simulation that runs, see raffia.search.state
    order: I64s
    path_node: I32s
    path_action: I32s
    path_length: I64s
    leaf: I64s
    stamp: I32s
    scores: F32s  # [A]
    parent_row: I64s
    node_row: I64s
    leaf_action: I64s
    reset: U8s
    # the selection's
    exploration: F32s  # [N]
    tie_seed: I64s  # [B]
    root_gumbel: F32s  # [B, A]
    considered: I32s  # [B, N - 1]
    gamma: F32s  # [B]
    min_range: float
    maxvisit_init: float
    value_scale: float
    kind: int
    normalize: int
    root_in_range: int
    # sizes and options
    roots: int  # B
    rows: int  # N
    actions: int  # A
    horizon: int  # 0: rewards, not value prefixes
    max_depth: int


class OutputRecord(Record):
    """The model's output: for the M roots of a simulation, or for all roots at the start."""

    reward: F32s  # [M]
    value: F32s  # [M]
    prior_logits: F32s  # [M, A]
    discount: F32s  # [M]
    mask: U8s  # [M, A]
    to_play: I32s  # [M]
    key: I64s  # [M]


search_at = fields_at(SearchRecord)
output_at = fields_at(OutputRecord)
