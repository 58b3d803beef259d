"""The loops of `raffia.data.ring.EpisodeRing`: steps come in and go out one by one, links are
followed.

Within them `r` is the ring. Item i lies in row i % N; an episode is named by the item of its first
step.
"""

from raffia.jit.kernel import kernel, load_f64, load_i64, load_u8, store_i64, store_u8
from raffia.jit.records import F32s, I64s, Record, U8s, fields_at

# What a row is. A closing row's kind is that of the step before it plus two.
STEP, TERMINATED, TRUNCATED, CLOSED_TERMINATED, CLOSED_TRUNCATED = range(5)
NONE = -1  # instead of an item, or a row
# What stands where in `counts`.
TOTAL, DRAWABLE, ENDED, LOST, WON = range(5)


class RingRecord(Record):
    """Links between N rows, and how far each of E environments is in its episode."""

    preceding: I64s  # [N] the row of the step before; of the first one of an episode the row itself
    following: I64s  # [N] the row of the step after; of the last one the row itself
    episode: I64s  # [N] its name, NONE where it is lost
    owner: I64s  # [N] the position of its environment
    kind: U8s  # [N]
    drawable: U8s  # [N] whether segments may start here
    env: I64s  # [E] numbers, ascending
    last: I64s  # [E] item of the newest step; NONE where the next one starts an episode
    name: I64s  # [E] of the episode, or NONE
    length: I64s  # [E] steps of this episode so far
    dropped: I64s  # [E] how many of these were overwritten
    waiting: I64s  # [E] row of the oldest step that cannot be drawn yet
    num_waiting: I64s  # [E]
    counts: I64s  # items, drawable steps, ended episodes; how many `lost` and `won` of this call
    lost: I64s  # [N] rows that can be drawn no more
    won: I64s  # [N] rows that can be drawn now
    num_rows: int  # N
    num_envs: int  # E
    look_ahead: int
    look_back: int


class SegmentsRecord(Record):
    """Segments [B, L] of rows, as `raffia.data.segment_batches.OF_ROWS` documents them."""

    rows: I64s  # [B, before + L]; the starts are written before
    item: I64s
    valid: U8s
    valid_step: U8s
    mask: U8s
    discount: F32s
    mask_of_kind: U8s
    discount_of_kind: F32s
    num_segments: int  # B
    before: int
    length: int  # L


ring_at = fields_at(RingRecord)
segments_at = fields_at(SegmentsRecord)


# -- rows


@kernel
def admit(r: RingRecord, row: int) -> None:
    r.drawable[row] = 1
    r.counts[DRAWABLE] += 1
    r.won[r.counts[WON]] = row
    r.counts[WON] += 1


@kernel
def withdraw(r: RingRecord, row: int) -> None:
    if r.drawable[row]:
        r.drawable[row] = 0
        r.counts[DRAWABLE] -= 1
        r.lost[r.counts[LOST]] = row
        r.counts[LOST] += 1


@kernel
def admit_waiting(r: RingRecord, e: int, num: int) -> None:
    """Make the oldest waiting steps drawable, except those with partly overwritten frames."""
    for _ in range(num):
        row, position = r.waiting[e], r.length[e] - r.num_waiting[e]
        if r.dropped[e] == 0 or position >= r.dropped[e] + r.look_back:
            admit(r, row)
        r.waiting[e] = r.following[row]
        r.num_waiting[e] -= 1


@kernel
def leave_episode(r: RingRecord, e: int) -> None:
    r.last[e] = r.name[e] = NONE
    r.length[e] = r.dropped[e] = r.num_waiting[e] = 0


# -- the oldest are overwritten


@kernel
def make_room(r: RingRecord, num_items: int) -> None:
    """Forget what the next items overwrite."""
    total = r.counts[TOTAL]
    oldest = min(max(0, total + num_items - r.num_rows), total)
    for item in range(max(0, total - r.num_rows), oldest):
        row = item % r.num_rows
        name = r.episode[row]
        if name != NONE:
            e = r.owner[row]
            if r.name[e] == name:
                shorten(r, e, row)
            else:
                forget(r, row)


@kernel
def forget(r: RingRecord, row: int) -> None:
    """Drop an ended episode, from one of its rows onwards."""
    r.counts[ENDED] -= 1
    while True:
        r.episode[row] = NONE
        withdraw(r, row)
        if r.following[row] == row:
            return
        row = r.following[row]


@kernel
def shorten(r: RingRecord, e: int, row: int) -> None:
    """Remove the oldest step of an unfinished episode; the steps after it lack frames."""
    r.episode[row] = NONE
    r.dropped[e] += 1
    withdraw(r, row)
    if r.num_waiting[e] and r.waiting[e] == row:
        r.waiting[e] = r.following[row]
        r.num_waiting[e] -= 1
    if r.last[e] % r.num_rows == row:  # all of it is overwritten
        r.last[e] = r.name[e] = NONE
        return
    row = r.following[row]
    r.preceding[row] = row
    for _ in range(r.look_back):
        withdraw(r, row)
        row = r.following[row]


# -- steps come in


@kernel
def find_envs(r: RingRecord, env: int, num: int, positions: int) -> bool:
    """The positions of environments by binary search; False if one is not known."""
    for i in range(num):
        number = load_i64(env + 8 * i)
        low, high = 0, r.num_envs
        while low < high:
            middle = (low + high) >> 1
            if r.env[middle] < number:
                low = middle + 1
            else:
                high = middle
        if low == r.num_envs or r.env[low] != number:
            return False
        store_i64(positions + 8 * i, low)
    return True


@kernel
def append(
    ring: int,
    env: int,  # address of int64 [E]
    positions: int,  # address of int64 [E] to work in
    num_envs: int,
    terminated: int,  # address of bools [T, E]
    truncated: int,
    num_times: int,
    num_ends: int,
) -> bool:
    """Add one step of each environment at each time, then the closing rows of all that end.

    False, and nothing is changed, if an environment is not known.
    """
    r = ring_at(ring)
    r.counts[LOST] = r.counts[WON] = 0
    if not find_envs(r, env, num_envs, positions):
        return False
    num_steps = num_times * num_envs
    make_room(r, num_steps + num_ends)
    item = r.counts[TOTAL]
    closing = item + num_steps
    for i in range(num_steps):
        e = load_i64(positions + 8 * (i % num_envs))
        row = item % r.num_rows
        add_step(r, e, item, row)
        if load_u8(terminated + i) or load_u8(truncated + i):
            r.kind[row] = TERMINATED if load_u8(terminated + i) else TRUNCATED
            close(r, e, row, closing % r.num_rows)
            closing += 1
        elif r.num_waiting[e] > r.look_ahead:
            admit_waiting(r, e, 1)
        item += 1
    r.counts[TOTAL] = closing
    return True


@kernel
def add_step(r: RingRecord, e: int, item: int, row: int) -> None:
    if r.last[e] == NONE:
        r.name[e] = item
        r.preceding[row] = row
    else:
        r.preceding[row] = r.last[e] % r.num_rows
        r.following[r.preceding[row]] = row
    r.following[row] = row
    r.episode[row], r.owner[row], r.kind[row] = r.name[e], e, STEP
    r.last[e] = item
    r.length[e] += 1
    if r.num_waiting[e] == 0:
        r.waiting[e] = row
    r.num_waiting[e] += 1


@kernel
def close(r: RingRecord, e: int, row: int, closing: int) -> None:
    """End the episode whose last step is in `row` with a closing row."""
    r.preceding[closing], r.following[row], r.following[closing] = row, closing, closing
    r.episode[closing], r.owner[closing], r.kind[closing] = r.name[e], e, r.kind[row] + 2
    r.counts[ENDED] += 1
    admit_waiting(r, e, r.num_waiting[e])
    leave_episode(r, e)


@kernel
def cut(ring: int, env: int, positions: int, num_envs: int, closing: int, before: int) -> int:
    """End the episodes of environments: their newest steps become closing rows.

    closing, before: addresses of int64 [E], the rows of these and of the steps before them; without
        such a step the closing row again.
    How many episodes were cut; -1 if an environment is not known.
    """
    r = ring_at(ring)
    r.counts[LOST] = r.counts[WON] = 0
    if not find_envs(r, env, num_envs, positions):
        return -1
    num = 0
    for i in range(num_envs):
        e = load_i64(positions + 8 * i)
        if r.last[e] != NONE:
            store_i64(closing + 8 * num, r.last[e] % r.num_rows)
            store_i64(before + 8 * num, cut_episode(r, e))
            num += 1
        leave_episode(r, e)
    return num


@kernel
def cut_episode(r: RingRecord, e: int) -> int:
    """Make the newest step the closing row; the row before it."""
    row = r.last[e] % r.num_rows
    before = r.preceding[row]
    withdraw(r, row)
    r.kind[before] = TRUNCATED
    r.kind[row] = CLOSED_TRUNCATED
    r.counts[ENDED] += 1
    if r.num_waiting[e]:
        admit_waiting(r, e, r.num_waiting[e] - 1)
    leave_episode(r, e)
    return before


@kernel
def skip(ring: int, num_items: int) -> None:
    """Leave numbers out, of which nothing is known."""
    r = ring_at(ring)
    r.counts[LOST] = r.counts[WON] = 0
    make_room(r, num_items)
    total = r.counts[TOTAL] + num_items
    for item in range(max(r.counts[TOTAL], total - r.num_rows), total):
        row = item % r.num_rows
        r.preceding[row] = r.following[row] = row
    r.counts[TOTAL] = total


@kernel
def lose(ring: int, rows: int, num: int) -> None:
    """Lose the episodes that any of these rows belong to."""
    r = ring_at(ring)
    r.counts[LOST] = r.counts[WON] = 0
    for i in range(num):
        row = load_i64(rows + 8 * i)
        if r.episode[row] == NONE:
            continue
        if r.name[r.owner[row]] == r.episode[row]:
            cut_episode(r, r.owner[row])
        while r.preceding[row] != row:
            row = r.preceding[row]
        forget(r, row)


# -- segments are read


@kernel
def later(ring: int, rows: int, fractions: int, num: int, out: int) -> None:
    """Find a later state in the episode of each step, as far on as the fraction in [0, 1) says."""
    r = ring_at(ring)
    for i in range(num):
        row, num_after = load_i64(rows + 8 * i), 0
        while r.following[row] != row:
            row = r.following[row]
            num_after += 1
        row = load_i64(rows + 8 * i)
        for _ in range(min(num_after, 1 + int(load_f64(fractions + 8 * i) * num_after))):
            row = r.following[row]
        store_i64(out + 8 * i, row)


@kernel
def find(ring: int, items: int, num: int, positions: int, rows: int, are_steps: int) -> int:
    """Find the rows of stored items; returns how many, or NONE if an item never existed."""
    r, found = ring_at(ring), 0
    total, oldest = r.counts[TOTAL], max(0, r.counts[TOTAL] - r.num_rows)
    for i in range(num):
        item = load_i64(items + 8 * i)
        if item < NONE or item >= total:
            return NONE
        if item >= oldest and r.episode[item % r.num_rows] != NONE:
            store_i64(positions + 8 * found, i)
            store_i64(rows + 8 * found, item % r.num_rows)
            store_u8(are_steps + found, r.kind[item % r.num_rows] < CLOSED_TERMINATED)
            found += 1
    return found


@kernel
def find_segments(ring: int, segments: int) -> None:
    """Follow the links back and forth from each start, and fill the entries about each row."""
    r, s = ring_at(ring), segments_at(segments)
    width, newest = s.before + s.length, r.counts[TOTAL] - 1
    newest_row = newest % r.num_rows
    # All segments go one step, then all the next: steps that don't wait for each other overlap.
    for k in range(s.before, 0, -1):
        for b in range(s.num_segments):
            s.rows[b * width + k - 1] = r.preceding[s.rows[b * width + k]]
    for k in range(s.length):
        for b in range(s.num_segments):
            at, i = b * width + s.before + k, b * s.length + k
            inside = True
            if k:
                s.rows[at] = r.following[s.rows[at - 1]]
                inside = s.rows[at] != s.rows[at - 1]
            row = s.rows[at]
            number = newest - newest_row + row - (r.num_rows if row > newest_row else 0)
            kind = r.kind[row]
            s.item[i] = number if inside else NONE
            s.valid[i], s.valid_step[i] = inside, kind < CLOSED_TERMINATED
            s.mask[i], s.discount[i] = s.mask_of_kind[kind], s.discount_of_kind[kind]
