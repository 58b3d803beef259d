"""The compiled loops of `SumTree`, which documents the tree's layout in memory, and of
`Priorities`.

Within them `t` is the tree.
"""

from raffia.jit.kernel import (
    kernel,
    load_f32,
    load_f64,
    load_i64,
    load_u8,
    prefetch,
    store_f64,
    store_i64,
)
from raffia.jit.records import F64s, I64s, Numbers, Record, fields_at

INFINITY = float("inf")
AHEAD = 32  # leaves; how long before its use memory is asked for
CHUNK = 1024  # draws; what they touch stays in the cache from one level to the next
UNKNOWN_ITEM, WRONG_PRIORITY = -1, -2
NOTHING_TO_DRAW, WRONG_FRACTION = 1, 2


class TreeRecord(Record):
    """A sum tree: all its nodes, from the leaves to the root."""

    sums: F64s
    minima: F64s  # the least of the leaves below that are not 0, of the nodes above the leaves
    starts: I64s  # [levels] the first node of each level
    before: F64s  # [16] to work in, the first is 0
    levels: int
    capacity: int
    sums_at: int  # addresses, to ask for memory ahead
    limit: float  # the largest value of a leaf


class PrioritiesRecord(Record):
    """How priorities become chances, the leaves of a tree."""

    tree: int  # its address
    alpha: float
    eps: float
    limit: float  # the largest priority allowed
    largest: F64s  # [1] grows to the largest priority


tree_at = fields_at(TreeRecord)
priorities_at = fields_at(PrioritiesRecord)


@kernel
def write(
    tree: int,
    index: int,  # address of n int64: leaves
    values: int,  # address of float64, `step` bytes apart (0: one value for all leaves)
    step: int,
    n: int,
    nodes: int,  # address of n int64 to work in
) -> bool:
    """Set leaves and recompute what stands above them; False, nothing written, if one is wrong."""
    # Fields that loops use are read before them: to the compiler any store may change a record.
    t = tree_at(tree)
    sums, sums_at, capacity, limit = t.sums, t.sums_at, t.capacity, t.limit
    for i in range(n):
        leaf = load_i64(index + 8 * i)
        value = load_f64(values + step * i)
        if not (0 <= leaf < capacity and 0.0 <= value <= limit):  # a NaN is not
            return False
    for i in range(n):
        coming = load_i64(index + 8 * min(i + AHEAD, n - 1))
        prefetch(sums_at + 8 * coming)
        prefetch(sums_at + 8 * (coming ^ 8))  # the other half of its block
        leaf = load_i64(index + 8 * i)
        sums[leaf] = load_f64(values + step * i)
        store_i64(nodes + 8 * i, leaf)
    refresh(t, nodes, n)
    return True


@kernel
def fill(tree: int, first: int, n: int, value: float, nodes: int) -> None:
    """Set the leaves of n items of a ring, item i in leaf i % capacity, to one value."""
    t = tree_at(tree)
    sums, capacity = t.sums, t.capacity
    for i in range(n):
        leaf = (first + i) % capacity
        sums[leaf] = value
        store_i64(nodes + 8 * i, leaf)
    refresh(t, nodes, n)


@kernel
def refresh(t: TreeRecord, nodes: int, n: int) -> None:
    """Recompute what stands above n leaves."""
    sums, minima, num_leaves = t.sums, t.minima, t.starts[1]
    for level in range(1, t.levels):
        first, below = t.starts[level], t.starts[level - 1]
        n = _parents(nodes, n, t.sums_at + 8 * first)
        for i in range(n):
            parent = load_i64(nodes + 8 * i)
            children = below + 16 * parent
            sums[first + parent] = _sum16(sums, children)
            if level == 1:
                low = min(_least8(sums, children), _least8(sums, children + 8))
            else:
                at = children - num_leaves
                low = min(_least8(minima, at), _least8(minima, at + 8))
            minima[first + parent - num_leaves] = low


@kernel
def _parents(nodes: int, n: int, sums: int) -> int:
    """Replace nodes by their parents, each once: a sum of -1 marks those visited already."""
    found = 0
    for i in range(n):
        parent = load_i64(nodes + 8 * i) >> 4
        if load_f64(sums + 8 * parent) >= 0.0:
            store_f64(sums + 8 * parent, -1.0)
            store_i64(nodes + 8 * found, parent)
            found += 1
            prefetch(sums + 8 * (parent ^ 8))
    return found


@kernel
def _sum16(sums: Numbers, at: int) -> float:
    return _sum8(sums, at) + _sum8(sums, at + 8)


@kernel
def _sum8(sums: Numbers, at: int) -> float:
    """The sum of pairs of pairs of pairs."""
    a = (sums[at] + sums[at + 1]) + (sums[at + 2] + sums[at + 3])
    return a + ((sums[at + 4] + sums[at + 5]) + (sums[at + 6] + sums[at + 7]))


@kernel
def _least8(values: Numbers, at: int) -> float:
    return min(_least4(values, at), _least4(values, at + 4))


@kernel
def _least4(values: Numbers, at: int) -> float:
    a = min(_counts(values[at]), _counts(values[at + 1]))
    return min(a, min(_counts(values[at + 2]), _counts(values[at + 3])))


@kernel
def _counts(value: float) -> float:
    """The value, infinity for a leaf that is 0, which cannot be drawn."""
    return value if value > 0.0 else INFINITY


@kernel
def draw(
    tree: int,
    u: int,  # address of n float64 in [0, 1)
    n: int,
    index: int,  # address of n int64: the leaves found
    values: int,  # address of n float64: their values
) -> int:
    """Find, for each u, the leaf at which the running sum of the leaves passes u * total.

    Returns 0, or what is wrong; then nothing useful was written.
    """
    t = tree_at(tree)
    total = t.sums[t.starts[t.levels - 1]]
    if not total > 0.0:
        return NOTHING_TO_DRAW
    for start in range(0, n, CHUNK):
        at, num = 8 * start, min(CHUNK, n - start)
        for i in range(num):
            fraction = load_f64(u + at + 8 * i)
            if not 0.0 <= fraction < 1.0:
                return WRONG_FRACTION
            store_f64(values + at + 8 * i, fraction * total)
            store_i64(index + at + 8 * i, 0)
        descend(t, index + at, values + at, num)
    return 0


@kernel
def descend(t: TreeRecord, index: int, values: int, n: int) -> None:
    """Descend the tree from shares of the total to leaves, and write the values of the leaves."""
    sums, before = t.sums, t.before
    # All go down one level, then all the next: steps that do not wait for each other overlap.
    for level in range(t.levels - 2, -1, -1):
        first, below = t.starts[level], t.sums_at + 8 * t.starts[max(level - 1, 0)]
        for i in range(n):
            left = load_f64(values + 8 * i)
            node = load_i64(index + 8 * i)
            block = first + 16 * node
            # The child is counted, not searched: half the branches would be mispredicted.
            child, end = 0, 0.0
            for k in range(15):
                end += sums[block + k]
                before[k + 1] = end
                child += int(left >= end)
            end += sums[block + 15]
            if left >= end:  # by rounding: take the last that is not zero
                child = 0
                for k in range(15):
                    child += int(before[k + 1] < end)
            store_f64(values + 8 * i, left - before[child])
            node = 16 * node + child
            store_i64(index + 8 * i, node)
            if level:
                prefetch(below + 128 * node)
                prefetch(below + 128 * node + 64)
    for i in range(n):
        store_f64(values + 8 * i, sums[load_i64(index + 8 * i)])


@kernel
def chance(priority: float, alpha: float, eps: float) -> float:
    return (priority + eps) ** alpha


@kernel
def update(
    record: int,
    items: int,  # address of n int64
    priorities: int,  # address of float64, or of float32 if `single`; `step` bytes apart
    step: int,
    single: int,
    n: int,
    first: int,  # the items that are here are first..end-1, item i in row i % capacity
    end: int,
    drawable: int,  # address of bools: of which rows priorities count; 0: of all
    work: int,  # address of 3 n numbers to work in
) -> int:
    """Set leaves to (priority + eps)^alpha; how many were left out, as their items are gone.

    If an item never was, or a priority is wrong, nothing is changed, and that is returned.
    """
    p = priorities_at(record)
    capacity = tree_at(p.tree).capacity
    rows, chances, nodes = work, work + 8 * n, work + 16 * n
    high, num = p.largest[0], 0
    for i in range(n):
        item = load_i64(items + 8 * i)
        at = priorities + step * i
        priority = float(load_f32(at)) if single else load_f64(at)
        if not 0 <= item < end:
            return UNKNOWN_ITEM
        if not 0.0 <= priority <= p.limit:  # a NaN is not
            return WRONG_PRIORITY
        row = item if item < capacity else item % capacity
        if item >= first and (drawable == 0 or load_u8(drawable + row)):
            high = max(high, priority)
            store_i64(rows + 8 * num, row)
            store_f64(chances + 8 * num, chance(priority, p.alpha, p.eps))
            num += 1
    p.largest[0] = high
    write(p.tree, rows, chances, 8, num, nodes)
    return n - num


@kernel
def raise_all(record: int, priorities: int, n: int) -> None:
    """Replace float64 priorities by their chances, with the bits that `update` writes."""
    p = priorities_at(record)
    for i in range(n):
        at = priorities + 8 * i
        store_f64(at, chance(load_f64(at), p.alpha, p.eps))
