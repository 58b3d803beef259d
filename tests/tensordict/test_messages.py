"""Containers that processes send to each other, and sum: over gloo, in separate processes."""

import asyncio
import os
import time

import pytest
import torch
import torch.distributed as dist

import raffia
from raffia import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, tensorclass
from raffia.tensordict import collectives, messages
from tests.ranks import Ranks
from tests.tensordict.kinds import each, raises


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(4)
    found.start()
    yield found
    found.close()


@tensorclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "pair"


def full(fill, *shape):
    return torch.full(shape, fill)


def tree(fill=0):
    """Entries of all kinds: dtypes, shapes, nests, an empty one, a value, some large, some not."""
    dtypes = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8)
    out = TensorDict({str(dtype): full(fill, 2, 3).to(dtype) for dtype in dtypes}, [2])
    deep = TensorDict(c=full(fill + 0.5j, 2, 1), batch_size=[2])
    none = TensorDict(batch_size=[2])
    out["n"] = TensorDict(deep=deep, none=none, zero=torch.zeros(2, 0), batch_size=[2])
    out["large"], out["turned"] = full(float(fill), 2, 50_000), full(float(fill), 3, 2).t()
    out["text"] = "a"
    return out


def plain(fill):
    return TensorDict(a=full(float(fill), 2, 3), b=TensorDict(c=full(fill, 2)))


def shared_row(fill):
    return TensorDict(a=TensorDict(x=torch.tensor(fill)), b=full(fill, 70_000))


# containers of each kind, whose tensors are filled with a number
KINDS = {
    "all": tree,
    "locked": lambda fill: plain(fill).lock_(),
    "mapped": lambda fill: plain(fill).memmap_(),
    "params": lambda fill: TensorDictParams(plain(fill)),
    "lazy": lambda fill: lazy_stack([plain(fill), TensorDict(a=full(fill, 5), d=full(fill, 1))]),
    "class": lambda fill: Pair(x=full(fill, 2), y=full(fill, 2, 4), batch_size=[2]),
    "class over a lazy stack": lambda fill: lazy_stack(
        [Pair(x=full(fill, n), y=full(fill)) for n in (1, 2)]
    ),
}
SUMMED = {**KINDS, "all": shared_row}


def shown(td):
    """The content of a container, in a form that can be pickled and compared."""
    if isinstance(td, torch.Tensor):
        return (str(td.dtype), td.tolist())
    if isinstance(td, LazyStackedTensorDict):
        return [shown(member) for member in td.tensordicts]
    if isinstance(td, raffia.TensorClass):
        return type(td).__name__, shown(td._td)
    if not isinstance(td, raffia.TensorCollection):
        return td
    return {key: shown(td.get(key)) for key in sorted(td.keys())}


def failure(act):
    """The class and the text of the error of a call; None without one."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------- one to another


def pass_on(rank, name):
    found = []
    for consolidated in (False, True):
        td = KINDS[name](7 if rank == 0 else 0)
        td = td.consolidate() if consolidated else td
        pointers = [leaf.data_ptr() for leaf in td._leaves([])]
        give = td.recv if rank else td.send
        found.append((give(1 - rank, consolidated=consolidated), shown(td)))
        assert pointers == [leaf.data_ptr() for leaf in td._leaves([])]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_received_values_are_written_into_the_entries(ranks, name):
    sent, taken = ranks.run(pass_on, 2, name)
    want, num = shown(KINDS[name](7)), len(KINDS[name](7)._leaves([]))
    assert sent == [(None, want)] * 2 and taken == [(num - 1, want), (None, want)]


def pass_to_others(rank, folder):
    """Sends to entries in another order, with other strides, to many, and to those of a file."""
    a, b = torch.arange(3.0), torch.arange(4)
    many = TensorDict({f"k{i}": full(float(i * (1 - rank)), i) for i in range(200)})
    many["b"] = full(rank == 0, 3)
    on_disk = TensorDict(a=torch.arange(4.0) * (1 - rank))
    if rank == 0:
        TensorDict(a=a, b=b).send(1), many.send(1), on_disk.send(1)
        return shown(many)
    td = TensorDict(b=torch.zeros_like(b), a=torch.zeros(3, 2)[:, 0])
    td.recv(0), many.recv(0), on_disk.memmap_(folder).recv(0)
    stored = TensorDict.load_memmap(folder)["a"].tolist()
    return td["a"].tolist(), td["b"].tolist(), td["a"].stride(), shown(many), stored


def test_order_strides_a_long_first_message_and_files(ranks, tmp_path):
    sent, (a, b, stride, taken, stored) = ranks.run(pass_to_others, 2, str(tmp_path))
    assert (a, b, stride) == ([0, 1, 2], [0, 1, 2, 3], (2,)) and stored == [0, 1, 2, 3]
    assert sent == taken and taken["k199"][1] == [199] * 199


def exchange(rank, consolidated):
    """Both send first: that ends only if each receives meanwhile."""
    other, works = 1 - rank, []
    into = [shared_row(0).consolidate() for _ in range(2)]
    for td in into:
        works += td.irecv(other, return_premature=True, consolidated=consolidated)
    sent = [shared_row(10 * rank + i).isend(other, consolidated=consolidated) for i in (1, 2)]
    last = [work.wait() for work in works]
    done = [work.is_completed() for work in works]
    return sent, last, done, [int(td["a", "x"]) for td in into], [int(td["b"].sum()) for td in into]


@pytest.mark.parametrize("consolidated", [False, True])
def test_both_can_send_first_and_transfers_keep_their_order(ranks, consolidated):
    for rank, (sent, last, done, small, large) in enumerate(ranks.run(exchange, 2, consolidated)):
        first = 10 * (1 - rank)
        assert small == [first + 1, first + 2] and large == [70_000 * n for n in small]
        assert sent == [None, None] if consolidated else sent == [1, 1]
        assert last == [True, True] and done == [True, True]


def tags(rank, pseudo_rand):
    one, two = TensorDict(a=torch.tensor(1), b=torch.tensor(5)), TensorDict(a=torch.tensor(2))
    if rank == 0:
        works = one.isend(1, init_tag=5, pseudo_rand=pseudo_rand, return_early=True)
        works += two.isend(1, init_tag=9, pseudo_rand=pseudo_rand, return_early=True)
        return [work.wait() for work in works] and None
    second, first = two.clone().zero_(), one.clone().zero_()
    found = [td.recv(0, init_tag=t, pseudo_rand=pseudo_rand) for td, t in ((second, 9), (first, 5))]
    return found, int(first["a"]), int(second["a"])


def test_tags_distinguish_transfers(ranks):
    assert ranks.run(tags, 2, False)[1] == ([9, 6], 1, 2)
    (later, earlier), one, two = ranks.run(tags, 2, True)[1]
    assert (one, two) == (1, 2) and abs(later - earlier) > 1000


def in_groups(rank):
    """Ranks 1 and 3 as a registered group, and as an unregistered one."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    found = []
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    own = dist.ProcessGroupGloo(store, {1: 0, 3: 1}[rank], 2)
    for way in (dict(group=group), dict(group=own)):
        for consolidated in (False, True):
            td = shared_row(rank).consolidate()
            if rank == 1:
                td.send(group_dst=1, consolidated=consolidated, **way)
            else:
                td.recv(group_src=0, consolidated=consolidated, **way)
            found.append(int(td["b"].sum()) // 70_000)
    td = shared_row(rank)
    td.send(3, group=group) if rank == 1 else td.recv(1, group=group)
    td.all_reduce(group=group)
    return found, int(td["a", "x"]), shown(td.broadcast(3, group=group)) == shown(td)


def test_groups_and_ranks_in_them(ranks):
    assert ranks.run(in_groups, 4) == [None, ([1] * 4, 2, True), None, ([1] * 4, 2, True)]


def base(a=3, b=torch.float32, key="b"):
    return TensorDict({"a": torch.ones(a), "n": TensorDict({key: torch.ones(2, dtype=b)})})


# trees that differ in one respect
TREES = {
    **{"base": base, "key": lambda: base(key="c"), "shape": lambda: base(4), "empty": TensorDict},
    "dtype": lambda: base(b=torch.int32),
    "large": lambda: base().set("z", torch.ones(100_000)),
    "value": lambda: base().set_non_tensor("s", 3),
    "other value": lambda: base().set_non_tensor("s", 4),
    "stack": lambda: lazy_stack([base(), base()]),
    "dense": lambda: raffia.stack([base(), base()]),
    "sparse": lambda: TensorDict(a=torch.eye(2).to_sparse()),
    "block": lambda: TensorDict(a=torch.ones(4), b=torch.ones(4)).consolidate(),
    "turned block": lambda: TensorDict(b=torch.ones(4), a=torch.ones(4)).consolidate(),
}


OTHER_WAY = "sent with consolidated=True, but here it is False"
DIFFERENT = [
    ("key", "base", "'n.b' only here; 'n.c' only there"),
    ("shape", "base", "'a' is float32 [4] there, float32 [3] here"),
    ("dtype", "base", "'n.b' is int32 [2] there, float32 [2] here"),
    ("large", "base", "'z' only there"),
    ("base", "large", "'z' only here"),
    ("value", "other value", "'s' is the value 3 there, the value 4 here"),
    ("stack", "dense", "'0.a' only there"),
    ("base", "empty", "'a' only there; 'n.b' only there"),
    ("base", "base", OTHER_WAY),
    ("large", "empty", OTHER_WAY),
    ("block", "turned block", "'a' is float32 [4] at byte 0 there, float32 [4] at byte 16 here"),
]


def different_trees(rank):
    """Errors of the receiver, which is unchanged; the next transfer works."""
    found = []
    for sent, received, words in DIFFERENT:
        td, blocks = TREES[received if rank else sent](), sent == "block"
        before, whole = shown(td), blocks or words == OTHER_WAY
        error = failure(
            lambda td=td, blocks=blocks, whole=whole: (
                td.recv(0, consolidated=blocks) if rank else td.send(1, consolidated=whole)
            )
        )
        assert shown(td) == before
        fine = shared_row(0 if rank else 3)
        fine.recv(0) if rank else fine.send(1)
        found.append((error, int(fine["b"].sum())))
    return found


def test_different_trees_are_an_error_that_names_the_difference(ranks):
    sender, receiver = ranks.run(different_trees)
    assert sender == [(None, 210_000)] * len(DIFFERENT)
    for (error, total), (*_, words) in zip(receiver, DIFFERENT, strict=True):
        assert error.startswith("ValueError") and words in error and total == 210_000


def premature(rank):
    if rank == 0:
        return base().send(1)
    (work,) = base(4).irecv(0, return_premature=True)
    return failure(lambda: work.wait(timeout=30))


def test_errors_of_a_transfer_are_raised_by_wait(ranks):
    assert "ValueError: irecv: what rank 0 sent does not fit: 'a' is" in ranks.run(premature)[1]


def test_invalid_calls_are_refused_before_anything_is_sent():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    leaves = [torch.zeros(n, dtype=d) for n, d in ((4, torch.float), (8, torch.int))]

    def lay_out(leaf):
        messages.layout(TensorDict(n=TensorDict(a=leaf)), "send")

    def no_bucket():
        collectives.reductions(leaves, 0, print, "all_reduce", torch.device("cpu"), True)

    V, T = ValueError, TypeError
    calls = [
        (lambda: base().send(), V, "pass dst, a rank .* got dst=None and group_dst=None"),
        (lambda: base().recv(0, group_src=1), V, "got src=0 and group_src=1"),
        (lambda: base().irecv(group_src=1), V, "irecv: group_src=1 is a rank within a group: pass"),
        (lambda: base().isend("x"), T, "isend: dst must be a rank, which is a number, got str"),
        (lambda: base().init_remote(), V, "pass dst, the rank of the receiver"),
        (no_bucket, V, "all_reduce: bucket_bytes=0 must be above 0"),
        (lambda: lay_out(rows), T, "'n.a' is a nested.*init_remote and broadcast send jagged ones"),
        (
            lambda: lay_out(torch.eye(2).to_sparse()),
            T,
            "'n.a' is of torch.float32 and torch.sparse",
        ),
        (lambda: lay_out(torch.empty(2, device="meta")), T, "entry 'n.a' has no memory"),
    ]
    each(calls, raises)


# -------------------------------------------------------------- to receivers without a container


def whole():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict(a=torch.arange(6.0).view(2, 3), text="word", batch_size=[2], names=["time"])
    td["pair"] = Pair(x=torch.ones(2), y=torch.zeros(2, 1), name="p", batch_size=[2])
    td["lazy"] = lazy_stack([TensorDict(k=torch.ones(1)), TensorDict(k=torch.ones(2), j=2)])
    td["rows"], td["none"] = rows, TensorDict(batch_size=[2])
    return td


def described(td):
    td.get("pair")
    return (
        td["a"].tolist(),
        td["text"],
        (type(td["pair"]).__name__, td["pair"].name, td["pair"].y.tolist()),
        [shown(member) for member in td.get("lazy").tensordicts],
        [row.tolist() for row in td["rows"].unbind()],
        (td.names, td.is_consolidated(), td["none"].batch_size),
    )


def remote(rank, use_broadcast):
    if rank == 0:
        td = whole()
        td.init_remote(1, use_broadcast=use_broadcast)
        return described(td.consolidate())
    return described(TensorDict.from_remote_init(0, use_broadcast=use_broadcast))


@pytest.mark.parametrize("use_broadcast", [False, True])
def test_a_container_is_created_from_the_message(ranks, use_broadcast):
    sent, taken = ranks.run(remote, 2, use_broadcast)
    assert taken == sent and taken[-1][0] == ["time"]


def remote_then_block(rank):
    if rank == 0:
        td = Pair(x=torch.zeros(2), y=torch.zeros(2, 40_000), batch_size=[2])
        td.init_remote(1)
        td.x += 1
        return td.send(1, consolidated=True)
    td = Pair.from_remote_init(0, device="cpu")
    before = td.x.tolist()
    td.recv(0, consolidated=True)
    return type(td).__name__, td.is_consolidated(), before, td.x.tolist()


def test_a_created_container_receives_the_next_message_as_one_block(ranks):
    assert ranks.run(remote_then_block)[1] == ("Pair", True, [0, 0], [1, 1])


def changed_since(rank):
    """A container that is one block, with entries at other offsets than before."""
    td = TensorDict(a=torch.ones(4), b=torch.zeros(4)).all_gather()[0]
    if rank == 1:
        return shown(TensorDict.from_remote_init(0)), shown(TensorDict.from_remote_init(0))
    td["a"], td["b"] = td["b"], td["a"]
    assert td.is_consolidated()
    td.init_remote(1)
    td.del_("a").init_remote(1)


def test_a_changed_block_is_sent_with_its_changes(ranks):
    ones, zeros = [("torch.float32", [n] * 4) for n in (1.0, 0.0)]
    assert ranks.run(changed_since)[1] == ({"a": zeros, "b": ones}, {"b": ones})


WAYS = {
    "remote": lambda td, rank: td.from_remote_init(0) if rank else td.init_remote(1),
    "scatter": lambda td, rank: td.scatter(0, None if rank else [td, td]),
    "gather_and_stack": lambda td, rank: td.gather_and_stack(1),
    "broadcast": lambda td, rank: td.broadcast(0),
    "all_gather": lambda td, rank: td.all_gather(),
}


def unsendable(rank, way):
    td = TensorDict(a=torch.ones(2))
    return failure(lambda: WAYS[way](td if rank else td.set("f", object()), rank))


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_sender_notifies_the_others(ranks, way):
    error, other = ranks.run(unsendable, 2, way)
    assert error.startswith("TypeError") and "'f' is a object" in error
    assert "RuntimeError" in other and "rank 0 could not send its container: entry 'f' is" in other


def coroutines(rank):
    async def program():
        if rank == 0:
            for fill in (1.0, 2.0):
                await TensorDict(a=full(fill, 2)).asend(1)
            return None
        first = await TensorDict().arecv(0)
        before = first["a"]
        second = await first.arecv(0)
        return second is first, before.tolist()

    return asyncio.run(program())


def test_coroutines(ranks):
    assert ranks.run(coroutines)[1] == (True, [2, 2])


# -------------------------------------------------------------------------- collective operations


OPTIONS = [{}, {"bucket_bytes": 1}, {"bucket_bytes": 2**20}, {"async_op": True}]
OPTIONS.append({"async_op": True, "bucket_bytes": 100})
TO_ONE = [*OPTIONS[:3], dict(async_op=True, return_premature=True)]


def reduced(rank, name):
    """The content after sums in all processes and in one, and after a broadcast."""
    found = []
    for method, options in [("all_reduce", o) for o in OPTIONS] + [("reduce", o) for o in TO_ONE]:
        td = SUMMED[name](rank + 1)
        works = getattr(td, method)(*[1] * (method == "reduce"), **options) or []
        for work in works:
            work.wait()
        waits = "async_op" in options and (method == "all_reduce" or "return_premature" in options)
        assert bool(works) == waits
        found.append(shown(td))
    return found, shown(SUMMED[name](rank + 1).broadcast(2))


@pytest.mark.parametrize("name", KINDS)
def test_sums_and_broadcasts(ranks, name):
    found = ranks.run(reduced, 4, name)
    for sums, _ in found:
        assert sums[: len(OPTIONS)] == [shown(SUMMED[name](10))] * len(OPTIONS)
    assert found[1][0][len(OPTIONS) :] == [shown(SUMMED[name](10))] * len(TO_ONE)
    assert [one for _, one in found] == [shown(SUMMED[name](3))] * 4


def other_ops(rank):
    td = TensorDict(a=torch.tensor([rank, -rank]), b=torch.eye(2).t()[:, :1] * rank)
    td.all_reduce(dist.ReduceOp.MAX)
    half = TensorDict(a=torch.ones(3).bfloat16(), c=full(1j, 2), e=torch.ones(0))
    half.all_reduce()
    return td["a"].tolist(), td["b"].tolist(), half["a"].sum().item(), half["c"][0].item()


def test_other_reductions_and_dtypes(ranks):
    assert ranks.run(other_ops, 4) == [([3, 0], [[3.0], [0.0]], 12.0, 4j)] * 4


def test_buckets_hold_small_leaves_of_one_dtype():
    small = ((4, torch.float), (8, torch.int), (4, torch.float), (2**16, torch.float), (0, None))
    leaves = [torch.zeros(n, dtype=dtype) for n, dtype in small]

    def sizes(*limits):
        return [[len(x) for x in bucket] for bucket in collectives.buckets(leaves, *limits)]

    assert sizes(2**18, 2**20) == [[4, 4], [8], [2**16]] == sizes(2**20, 32)
    assert len(sizes(1, 1)) == 4


def disagree(rank, op, different, usual, other):
    td = TREES[other if rank == different else usual]()
    text = failure(lambda: getattr(td, op)(*[0] * (op != "all_reduce")))
    fine = TensorDict(a=torch.ones(2))
    fine.all_reduce()
    return text, fine["a"].tolist()


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "gather_and_stack"])
def test_different_trees_are_an_error_in_all_processes(ranks, op):
    for text, fine in ranks.run(disagree, 4, op, 2, "base", "shape"):
        first = 1 if op == "gather_and_stack" else 0
        assert text.startswith("ValueError") and f"containers of ranks {first} and 2 differ" in text
        assert f"'a' is float32 [3] on rank {first}, float32 [4] on rank 2" in text
        assert fine == [4, 4]


def test_a_failed_sum_notifies_the_others_and_changes_no_value(ranks):
    errors = [text for text, _ in ranks.run(disagree, 4, "all_reduce", 1, "base", "sparse")]
    kinds = ["ValueError", "TypeError", "ValueError", "ValueError"]
    assert [text.partition(":")[0] for text in errors] == kinds
    assert all(["entry 'a' is of torch.float32" in text for text in errors])
    assert "rank 1 can't take part" in errors[0]
    found = ranks.run(disagree, 2, "all_reduce", -1, "sparse", "sparse")
    assert all([text.startswith("TypeError") for text, _ in found])
    found = ranks.run(disagree, 2, "all_reduce", 1, "value", "other value")
    assert found[0] == (None, [2, 2])


def broadcast_itself(rank):
    block, plain = base().consolidate(), base()
    copy = plain.broadcast(0)
    return block.broadcast(0) is block, copy is plain, copy.is_consolidated()


def test_the_sender_also_gets_the_block(ranks):
    assert ranks.run(broadcast_itself) == [(True, False, True), (False, False, True)]


def gathered(rank):
    td = TensorDict(a=full(rank, rank), r=f"rank {rank}")
    if rank == 2:
        td["more"] = TensorDict(x=torch.ones(100, dtype=torch.float64))
    found = td.all_gather()
    for one in found:
        for leaf in one._leaves([]):
            leaf += 0  # it is memory that can be written into
    return [(one["r"], one["a"].tolist(), sorted(map(str, one.keys()))) for one in found]


def test_all_processes_get_all_values(ranks):
    expected = [(f"rank {rank}", [rank] * rank, ["a", "r"]) for rank in range(4)]
    expected[2][2].insert(1, "more")
    assert ranks.run(gathered, 4) == [expected] * 4


def gather_rows(rank, name, dst=1):
    td = torch.stack([KINDS[name](0)] * 3) if rank == dst else KINDS[name](rank + 1)
    td = td.lock_()
    gathered = td.gather_and_stack(dst)
    return None if gathered is None else (gathered is td, shown(td))


@pytest.mark.parametrize("name", ["all", "class"])
def test_rows_of_the_others_are_stacked(ranks, name):
    expected = shown(torch.stack([KINDS[name](fill) for fill in (1, 3, 4)]))
    assert ranks.run(gather_rows, 4, name) == [None, (True, expected), None, None]


def gather_too_many(rank):
    return failure(lambda: TensorDict(a=torch.ones(2), batch_size=[2]).gather_and_stack(0))


def scattered(rank, num):
    tds = [TensorDict(a=full(i, i), i=f"{i}") for i in range(num)]
    found = []
    error = failure(
        lambda: found.append(TensorDict().scatter(1, tds if rank == 1 else None, device="cpu"))
    )
    return error or [(td["a"].tolist(), td["i"], td.is_consolidated()) for td in found]


def test_scatter_and_gather_check_the_number_of_rows(ranks):
    assert ranks.run(scattered, 4, 4) == [[([i] * i, f"{i}", True)] for i in range(4)]
    first, second = ranks.run(scattered, 2, 3)
    text = "scatter: 2 processes take one container each, got 3: pass a list of 2 at rank 1"
    assert second == f"ValueError: {text}"
    assert first.startswith("RuntimeError: ") and first.endswith(f"its container: {text}")
    text, none = ranks.run(gather_too_many)
    assert "1 other processes sent a row each, but the batch size here is [2]" in text
    assert text.startswith("ValueError") and none is None


# ------------------------------------------------------------------------------- the harness itself


def hangs(rank):
    time.sleep(60 * (rank == 0))


def dies(rank):
    os.abort() if rank == 0 else None


@pytest.mark.slow
def test_ranks_that_hang_or_die_are_found(ranks):
    with pytest.raises(AssertionError, match="rank 0 is not done after 0.5 seconds"):
        ranks.run(hangs, 2, seconds=0.5)
    with pytest.raises(AssertionError, match="rank 0, exit code -6"):
        ranks.run(dies)
    assert ranks.run(broadcast_itself, 1) == [(True, False, True)]
