"""The arguments of the kernels: one block of addresses and whole numbers, one of reals.

`WORDS` and `REALS` number the slots; both sides of the call take them from here.
"""

ENTRIES = (
    *("visits", "value_sum", "raw_value", "reward", "discount", "parent", "action", "depth"),
    *("ended", "children", "children_visits", "children_q", "prior", "num_tried", "q_sum"),
    *("q_min", "q_max", "mask", "prior_logits", "to_play", "value_prefix", "key", "canonical"),
)  # addresses of a tree's entries; 0: the tree has no such entry
PATHS = ("order", "path_node", "path_action", "path_length", "leaf", "stamp", "scratch")
MEMORY = ("parent_row", "node_row", "leaf_action", "reset")
SELECTION = ("table", "tie_seed", "root_gumbel", "considered", "gamma")
NUMBERS = (
    *("roots", "rows", "actions", "kind", "normalize", "root_in_range", "horizon", "max_depth"),
    "table_width",
)
WORDS = {name: slot for slot, name in enumerate((*ENTRIES, *PATHS, *MEMORY, *SELECTION, *NUMBERS))}
REALS = {name: slot for slot, name in enumerate(("min_range", "maxvisit_init", "value_scale"))}

PUCT, GUMBEL = 0, 1  # kind
RUNNING, TREE, SIBLINGS = 0, 1, 2  # normalize
FIELDS = ("reward", "value", "prior_logits", "discount")  # what may hold NaN, as backup reports it

# the slots by name, as kernels read them
VISITS, VALUE_SUM, RAW_VALUE = WORDS["visits"], WORDS["value_sum"], WORDS["raw_value"]
REWARD, DISCOUNT, PARENT = WORDS["reward"], WORDS["discount"], WORDS["parent"]
ACTION, DEPTH, ENDED = WORDS["action"], WORDS["depth"], WORDS["ended"]
CHILDREN, CHILDREN_VISITS = WORDS["children"], WORDS["children_visits"]
CHILDREN_Q, PRIOR = WORDS["children_q"], WORDS["prior"]
NUM_TRIED, Q_SUM, Q_MIN, Q_MAX = (WORDS[n] for n in ("num_tried", "q_sum", "q_min", "q_max"))
MASK, PRIOR_LOGITS, TO_PLAY = WORDS["mask"], WORDS["prior_logits"], WORDS["to_play"]
VALUE_PREFIX, KEY, CANONICAL = WORDS["value_prefix"], WORDS["key"], WORDS["canonical"]
ORDER, PATH_NODE, PATH_ACTION = WORDS["order"], WORDS["path_node"], WORDS["path_action"]
PATH_LENGTH, LEAF, STAMP = WORDS["path_length"], WORDS["leaf"], WORDS["stamp"]
SCRATCH = WORDS["scratch"]
PARENT_ROW, NODE_ROW, LEAF_ACTION = WORDS["parent_row"], WORDS["node_row"], WORDS["leaf_action"]
RESET = WORDS["reset"]
TABLE, TIE_SEED, GAMMA = WORDS["table"], WORDS["tie_seed"], WORDS["gamma"]
ROOT_GUMBEL, CONSIDERED = WORDS["root_gumbel"], WORDS["considered"]
ROWS, ACTIONS, KIND, NORMALIZE = (WORDS[n] for n in ("rows", "actions", "kind", "normalize"))
ROOT_IN_RANGE, HORIZON = WORDS["root_in_range"], WORDS["horizon"]
MAX_DEPTH, TABLE_WIDTH = WORDS["max_depth"], WORDS["table_width"]
ROOTS = WORDS["roots"]
MIN_RANGE, MAXVISIT_INIT = REALS["min_range"], REALS["maxvisit_init"]
VALUE_SCALE = REALS["value_scale"]
