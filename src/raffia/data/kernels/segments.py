"""The loop of `raffia.data.segments.find_segments`, which documents what it computes."""

from raffia.jit.kernel import kernel, load_i64, load_u8, load_u32, store_i64, store_u8, store_u32


@kernel
def find_segments(
    num_segments: int,
    before: int,
    length: int,
    preceding: int,  # address of int64 for each row of the ring, as is following
    following: int,
    kind: int,  # address of uint8 for each row
    num_rows: int,  # of the ring
    newest: int,  # item
    mask_of_kind: int,  # address of uint8
    discount_of_kind: int,  # address of float32
    closed: int,  # the first kind that is no step
    rows: int,  # address of int64 [num_segments, before + length]; the starts are written before
    item: int,  # address of int64 [num_segments, length], as are those that follow
    valid: int,  # uint8, as the next two
    valid_step: int,
    mask: int,
    discount: int,  # float32
) -> None:
    """Follow the links back and forth from each start, and fill the entries about each row."""
    width = 8 * (before + length)
    newest_row = newest % num_rows
    # All segments go one step, then all the next: steps that don't wait for each other overlap.
    for k in range(before, 0, -1):
        at = rows + 8 * k
        for _ in range(num_segments):
            store_i64(at - 8, load_i64(preceding + 8 * load_i64(at)))
            at += width
    for k in range(length):
        at = rows + 8 * (before + k)
        index = k  # in the tensors [num_segments, length]
        for _ in range(num_segments):
            inside = 1
            if k:
                last = load_i64(at - 8)
                row = load_i64(following + 8 * last)
                store_i64(at, row)
                inside = int(row != last)
            else:
                row = load_i64(at)
            number = newest - newest_row + row - (num_rows if row > newest_row else 0)
            this = load_u8(kind + row)
            store_i64(item + 8 * index, number if inside else -1)
            store_u8(valid + index, inside)
            store_u8(valid_step + index, int(this < closed))
            store_u8(mask + index, load_u8(mask_of_kind + this))
            store_u32(discount + 4 * index, load_u32(discount_of_kind + 4 * this))
            at += width
            index += length
