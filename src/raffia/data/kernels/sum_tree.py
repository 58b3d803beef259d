"""The compiled loops of `raffia.data.sum_tree.SumTree`, which documents the tree's layout in
memory."""

from raffia.jit.kernel import kernel, load_f64, load_i64, prefetch, store_f64, store_i64

INFINITY = float("inf")
AHEAD = 32  # leaves; how long before its use memory is asked for
CHUNK = 1024  # draws; what they touch stays in the cache from one level to the next


@kernel
def write(
    index: int,  # address of n int64: leaves
    values: int,  # address of float64, `step` bytes apart (0: one value for all leaves)
    step: int,
    n: int,
    capacity: int,
    limit: float,  # the largest value allowed
    sums: int,  # address of all nodes, float64
    starts: int,  # address of the number of the first node of each level, int64
    levels: int,
    minima: int,  # address of the least of the leaves below, of the nodes above the leaves
    nodes: int,  # address of n int64 to work in
) -> bool:
    """Set leaves and recompute what stands above them; False, nothing written, if one is wrong."""
    for i in range(n):
        leaf = load_i64(index + 8 * i)
        value = load_f64(values + step * i)
        if not (0 <= leaf < capacity and 0.0 <= value <= limit):  # a NaN is not
            return False
    for i in range(n):
        coming = load_i64(index + 8 * min(i + AHEAD, n - 1))
        prefetch(sums + 8 * coming)
        prefetch(sums + 8 * (coming ^ 8))  # the other half of its block
        leaf = load_i64(index + 8 * i)
        store_f64(sums + 8 * leaf, load_f64(values + step * i))
        store_i64(nodes + 8 * i, leaf)
    for level in range(1, levels):
        first, below = load_i64(starts + 8 * level), load_i64(starts + 8 * level - 8)
        n = _parents(nodes, n, sums + 8 * first)
        for i in range(n):
            parent = load_i64(nodes + 8 * i)
            at = first + parent
            children = below + 16 * parent
            store_f64(sums + 8 * at, _sum16(sums + 8 * children))
            if level == 1:
                low = _least16(sums + 8 * children, 1)
            else:
                low = _least16(minima + 8 * (children - load_i64(starts + 8)), 0)
            store_f64(minima + 8 * (at - load_i64(starts + 8)), low)
    return True


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
def _sum2(at: int) -> float:
    return load_f64(at) + load_f64(at + 8)


@kernel
def _sum4(at: int) -> float:
    return _sum2(at) + _sum2(at + 16)


@kernel
def _sum8(at: int) -> float:
    return _sum4(at) + _sum4(at + 32)


@kernel
def _sum16(at: int) -> float:
    return _sum8(at) + _sum8(at + 64)


@kernel
def _least2(at: int, leaves: int) -> float:
    a, b = load_f64(at), load_f64(at + 8)
    if leaves:  # of the leaves, those that are zero do not count
        a, b = (a if a > 0.0 else INFINITY), (b if b > 0.0 else INFINITY)
    return a if a < b else b


@kernel
def _least4(at: int, leaves: int) -> float:
    a, b = _least2(at, leaves), _least2(at + 16, leaves)
    return a if a < b else b


@kernel
def _least16(at: int, leaves: int) -> float:
    a, b = _least4(at, leaves), _least4(at + 32, leaves)
    c, d = _least4(at + 64, leaves), _least4(at + 96, leaves)
    a, c = (a if a < b else b), (c if c < d else d)
    return a if a < c else c


@kernel
def draw(
    u: int,  # address of n float64 in [0, 1)
    n: int,
    sums: int,
    starts: int,
    levels: int,
    index: int,  # address of n int64: the leaves found
    values: int,  # address of n float64: their values
    before: int,  # address of 16 float64 to work in, the first of them 0
) -> int:
    """For each u the leaf where the running sum of the leaves passes u * total.

    Returns 0, or 1 if all leaves are zero, or 2 if a u is wrong; then nothing useful was written.
    """
    total = load_f64(sums + 8 * load_i64(starts + 8 * levels - 8))
    if not total > 0.0:
        return 1
    for start in range(0, n, CHUNK):
        wrong = _draw(
            u + 8 * start,
            min(CHUNK, n - start),
            total,
            sums,
            starts,
            levels,
            index + 8 * start,
            values + 8 * start,
            before,
        )
        if wrong:
            return wrong
    return 0


@kernel
def _draw(
    u: int,
    n: int,
    total: float,
    sums: int,
    starts: int,
    levels: int,
    index: int,
    values: int,
    before: int,
) -> int:
    for i in range(n):
        fraction = load_f64(u + 8 * i)
        if not 0.0 <= fraction < 1.0:
            return 2
        store_f64(values + 8 * i, fraction * total)
        store_i64(index + 8 * i, 0)
    # All go down one level, then all the next: steps that do not wait for each other overlap.
    for level in range(levels - 2, -1, -1):
        first = sums + 8 * load_i64(starts + 8 * level)
        below = sums + 8 * load_i64(starts + 8 * max(level - 1, 0))
        for i in range(n):
            t = load_f64(values + 8 * i)
            node = load_i64(index + 8 * i)
            block = first + 128 * node
            # The child is counted, not searched: half the branches would be mispredicted.
            child, end = 0, 0.0
            for k in range(15):
                end += load_f64(block + 8 * k)
                store_f64(before + 8 * k + 8, end)
                child += int(t >= end)
            end += load_f64(block + 120)
            if t >= end:  # by rounding: take the last that is not zero
                child = 0
                for k in range(15):
                    child += int(load_f64(before + 8 * k + 8) < end)
            store_f64(values + 8 * i, t - load_f64(before + 8 * child))
            node = 16 * node + child
            store_i64(index + 8 * i, node)
            if level:
                prefetch(below + 128 * node)
                prefetch(below + 128 * node + 64)
    for i in range(n):
        store_f64(values + 8 * i, load_f64(sums + 8 * load_i64(index + 8 * i)))
    return 0


@kernel
def locate(
    items: int,  # address of n int64
    priorities: int,  # address of float64, `step` bytes apart
    step: int,
    n: int,
    first: int,  # the items that are here are first..end-1
    end: int,
    capacity: int,
    limit: float,  # the largest priority allowed
    rows: int,  # address of n int64: item % capacity
    largest: int,  # address of a float64: the largest priority
) -> int:
    """How many items are older than those here; -1 if there never was such an item, -2 if a
    priority is wrong."""
    old = 0
    high = 0.0
    for i in range(n):
        item = load_i64(items + 8 * i)
        priority = load_f64(priorities + step * i)
        if not 0 <= item < end:
            return -1
        if not 0.0 <= priority <= limit:  # a NaN is not
            return -2
        old += int(item < first)
        high = max(high, priority)
        store_i64(rows + 8 * i, item if item < capacity else item % capacity)
    store_f64(largest, high)
    return old
