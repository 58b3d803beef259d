"""What the kernels are given: one block of addresses and whole numbers, one of reals.

`WORDS` and `REALS` name the places; both sides of the call take them from here.
"""

ENTRIES = (
    *("visits", "value_sum", "raw_value", "reward", "discount", "parent", "action", "depth"),
    *("ended", "children", "children_visits", "children_q", "prior", "num_tried", "q_sum"),
    *("q_min", "q_max", "mask", "prior_logits", "to_play", "value_prefix", "key", "canonical"),
)  # addresses of a tree's entries; 0: the tree has no such entry
PATHS = ("order", "path_node", "path_action", "path_length", "leaf", "stamp", "scratch")
MEMORY = ("parent_row", "node_row", "move", "reset")
SELECTION = ("table", "tie_seed", "root_gumbel", "considered", "gamma")
NUMBERS = (
    *("roots", "rows", "actions", "kind", "normalize", "root_in_range", "horizon", "max_depth"),
    *("table_width", "players"),
)
WORDS = {
    name: place for place, name in enumerate((*ENTRIES, *PATHS, *MEMORY, *SELECTION, *NUMBERS))
}
REALS = {name: place for place, name in enumerate(("min_range", "maxvisit_init", "value_scale"))}

PUCT, GUMBEL = 0, 1  # kind
RUNNING, TREE, SIBLINGS = 0, 1, 2  # normalize
FIELDS = ("reward", "value", "prior_logits", "discount")  # what may hold NaN, as backup reports it
