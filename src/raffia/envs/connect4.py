"""Looking ahead in Connect4: negamax with alpha-beta, on two words a board.

Bit `7 * column + height` stands for a cell, height 0 at the bottom; a seventh height is never
taken, so that lines are found by shifts that do not run from one column into the next (Tromp's bit
boards; Pons, "Solving Connect 4").

All functions but `column_scores` take and give whole numbers only, so they are compiled where numba
is; where not, the same lines run as Python, a hundred times slower.
"""

from __future__ import annotations

from raffia.jit.kernel import kernel

CELLS = 42
WIN = 10_000  # and one more for each cell that is still free then: sooner is better
NO_MOVE = -100_000  # the column is full
_BOTTOM = sum(1 << 7 * column for column in range(7))
_BOARD = _BOTTOM * 0b111111
_CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)  # the sooner a good move is tried, the more is cut off
_DIRECTIONS = (1, 7, 6, 8)  # up, right, right and down, right and up


def _starts(columns: range, heights: range) -> int:
    return sum(1 << 7 * column + height for column in columns for height in heights)


_LINE_STARTS = (  # where a line of four may begin, for each direction
    _starts(range(7), range(3)),
    _starts(range(4), range(6)),
    _starts(range(4), range(3, 6)),
    _starts(range(4), range(3)),
)


@kernel
def num_bits(word: int) -> int:
    """The number of bits that are set.

    >>> num_bits(0b1011)
    3
    """
    count = 0
    while word:
        word &= word - 1
        count += 1
    return count


@kernel
def has_four(stones: int) -> bool:
    """Whether four of these stones form a line.

    >>> has_four(0b1111), has_four(0b110110), has_four(1 | 1 << 8 | 1 << 16 | 1 << 24)
    (True, False, True)
    """
    for shift in _DIRECTIONS:
        pairs = stones & (stones >> shift)
        if pairs & (pairs >> 2 * shift):
            return True
    return False


@kernel
def open_lines(own: int, other: int) -> int:
    """The score of lines that are still open to the owner: 1 for one stone, 4 for two, 16 for
    three.

    All lines of a direction are counted in one pass: bit i of a word is the line that starts at i.

    >>> open_lines(1, 0)  # a stone in the corner: three lines
    3
    >>> open_lines(0b11, 0b100), open_lines(0, 0b1)
    (4, 0)
    """
    total = 0
    for direction in range(4):
        shift = _DIRECTIONS[direction]
        a, b, c, d = own, own >> shift, own >> 2 * shift, own >> 3 * shift
        blocked = other | other >> shift | other >> 2 * shift | other >> 3 * shift
        free = _LINE_STARTS[direction] & ~blocked
        one_of_ab, one_of_cd, both_ab, both_cd = a ^ b, c ^ d, a & b, c & d
        none_ab, none_cd = ~(a | b), ~(c | d)
        ones = (one_of_ab & none_cd) | (none_ab & one_of_cd)
        twos = (both_ab & none_cd) | (none_ab & both_cd) | (one_of_ab & one_of_cd)
        threes = (both_ab & one_of_cd) | (one_of_ab & both_cd)
        total += num_bits(ones & free) + 4 * num_bits(twos & free) + 16 * num_bits(threes & free)
    return total


@kernel
def winning_cells(stones: int, playable: int) -> int:
    """The playable cells that complete a line of four with these stones.

    >>> winning_cells(0b111, 0b1000 | 1 << 7)
    8
    """
    wins = 0
    while playable:
        cell = playable & -playable
        playable ^= cell
        if has_four(stones | cell):
            wins |= cell
    return wins


@kernel
def negamax(own: int, other: int, depth: int, alpha: int, beta: int) -> int:
    """The value of a position for the player to move, owner of `own`; outside alpha..beta a bound.

    depth: plies that are looked ahead; wins that are one ply further are found, too. With as many
        as cells are free the answer is exact: 0 or beyond +-WIN.

    >>> negamax(0b111, 0b111 << 7, 1, -2 * WIN, 2 * WIN) == WIN + 35  # wins now, 35 cells free
    True
    """
    occupied = own | other
    free = CELLS - num_bits(occupied)
    if free == 0:
        return 0
    playable = (occupied + _BOTTOM) & _BOARD
    if winning_cells(own, playable):
        return WIN + free - 1
    if depth <= 0:
        return open_lines(own, other) - open_lines(other, own)
    forced = winning_cells(other, playable)
    if forced:
        playable = forced  # anything else loses now; so does one of two, for want of the other
    best = -2 * WIN
    for column in _CENTRE_FIRST:
        cell = playable & (0b111111 << 7 * column)
        if cell:
            score = -negamax(other, own | cell, depth - 1, -beta, -alpha)
            if score > best:
                best = score
                alpha = max(alpha, best)
                if alpha >= beta:
                    break
    return best


def column_scores(own: int, other: int, depth: int) -> list[int]:
    """The value of each column for the player to move: beyond +-`WIN` it is decided, `NO_MOVE`:
    full.

    Scores are exact for the best columns, to a depth of `depth` plies or more; what is worse than
    the best by one or more is only known to be so.

    >>> scores = column_scores(0b111, 0b111 << 7, depth=4)
    >>> scores.index(max(scores)), max(scores) > WIN
    (0, True)
    """
    playable = ((own | other) + _BOTTOM) & _BOARD
    free = CELLS - num_bits(own | other)
    scores = [NO_MOVE] * 7
    best = -2 * WIN
    for column in _CENTRE_FIRST:
        cell = playable & (0b111111 << 7 * column)
        if cell and has_four(own | cell):
            scores[column] = WIN + free - 1
        elif (
            cell
        ):  # an alpha-beta window that begins below the best tells its equals from worse ones
            scores[column] = -negamax(other, own | cell, depth - 1, -2 * WIN, -(best - 1))
        best = max(best, scores[column])
    return scores
