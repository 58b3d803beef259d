"""Containers that processes send to each other, and sum: over gloo, in processes of their own."""

import asyncio

import pytest
import torch
import torch.distributed as dist

import raffia
from raffia import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, tensorclass
from raffia.tensordict import collectives, messages
from tests.ranks import Ranks


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


def tree(fill=0):
    """Entries of all kinds: dtypes, shapes, nests, an empty one, a value, some large, some not."""
    dtypes = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8)
    out = TensorDict({str(dtype): torch.full((2, 3), fill).to(dtype) for dtype in dtypes}, [2])
    out["n"] = TensorDict(
        deep=TensorDict(c=torch.full((2, 1), fill + 0.5j), batch_size=[2]),
        none=TensorDict(batch_size=[2]),
        zero=torch.zeros(2, 0),
        batch_size=[2],
    )
    out["large"] = torch.full((2, 50_000), float(fill))
    out["turned"] = torch.full((3, 2), float(fill)).t()
    out["text"] = "a"
    return out


def shown(td):
    """What a container holds, in a form that is sent by pickle and compared."""
    if isinstance(td, torch.Tensor):
        return (str(td.dtype), td.tolist())
    if isinstance(td, LazyStackedTensorDict):
        return [shown(member) for member in td.tensordicts]
    if isinstance(td, raffia.TensorClass):
        return type(td).__name__, shown(td._td)
    if not isinstance(td, raffia.TensorCollection):
        return td
    return {key: shown(td.get(key)) for key in sorted(td.keys())}


def kind(name, fill):
    """A container of a kind, whose tensors are filled with a number."""
    plain = TensorDict(a=torch.full((2, 3), float(fill)), b=TensorDict(c=torch.full((2,), fill)))
    if name == "locked":
        return plain.lock_()
    if name == "mapped":
        return plain.memmap_()
    if name == "params":
        return TensorDictParams(plain)
    if name == "lazy":
        return lazy_stack([plain, TensorDict(a=torch.full((5,), fill), d=torch.full((1,), fill))])
    if name == "class":
        return Pair(x=torch.full((2,), fill), y=torch.full((2, 4), fill), batch_size=[2])
    if name == "class over a lazy stack":
        pairs = [Pair(x=torch.full((n,), fill), y=torch.full((), fill)) for n in (1, 2)]
        return lazy_stack(pairs)
    if name == "shared row":
        return TensorDict(a=TensorDict(x=torch.tensor(fill)), b=torch.full((70_000,), fill))
    return tree(fill)


KINDS = ["all", "locked", "mapped", "params", "lazy", "class", "class over a lazy stack"]


# ------------------------------------------------------------------------------- one to another


def pass_on(rank, name, consolidated):
    td = kind(name, 7 if rank == 0 else 0)
    if consolidated:
        td = td.consolidate()
    pointers = [leaf.data_ptr() for leaf in td._leaves([])]
    if rank == 0:
        return td.send(dst=1, consolidated=consolidated), shown(td), True
    tag = td.recv(src=0, consolidated=consolidated)
    return tag, shown(td), pointers == [leaf.data_ptr() for leaf in td._leaves([])]


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_sent_is_written_into_the_entries(ranks, name, consolidated):
    (none, sent, _), (tag, taken, in_place) = ranks.run(pass_on, 2, name, consolidated)
    assert none is None and in_place
    assert taken == sent == shown(kind(name, 7))
    assert tag == (None if consolidated else len(kind(name, 7)._leaves([])) - 1)


def pass_to_unsorted(rank):
    a, b = torch.arange(3.0), torch.arange(4)
    if rank == 0:
        TensorDict(a=a, b=b).send(1)
        return None
    td = TensorDict(b=torch.zeros_like(b), a=torch.zeros(3, 2)[:, 0])
    td.recv(0)
    return shown(td), td["a"].stride()


def test_the_order_of_entries_and_strides_play_no_part(ranks):
    _, (taken, stride) = ranks.run(pass_to_unsorted)
    assert taken == shown(TensorDict(a=torch.arange(3.0), b=torch.arange(4))) and stride == (2,)


def many(rank):
    td = TensorDict({f"k{i}": torch.full((i,), float(i * (1 - rank))) for i in range(200)})
    td["b"] = torch.full((3,), rank == 0)
    td.send(1) if rank == 0 else td.recv(0)
    return shown(td)


def test_a_long_first_message(ranks):
    sent, taken = ranks.run(many)
    assert sent == taken and taken["k199"][1] == [199] * 199


def mapped_file(rank, folder):
    td = TensorDict(a=torch.arange(4.0) * (1 - rank))
    if rank == 0:
        td.send(1)
        return None
    td.memmap_(folder).recv(0)
    return TensorDict.load_memmap(folder)["a"].tolist()


def test_what_comes_into_mapped_entries_is_in_their_files(ranks, tmp_path):
    assert ranks.run(mapped_file, 2, str(tmp_path))[1] == [0, 1, 2, 3]


def exchange(rank, consolidated):
    """Both send first: that ends only if what comes is received meanwhile."""
    other = 1 - rank
    into = [kind("shared row", 0).consolidate() for _ in range(2)]
    works = []
    for td in into:
        works += td.irecv(other, return_premature=True, consolidated=consolidated)
    sent = [
        kind("shared row", 10 * rank + i).isend(other, consolidated=consolidated) for i in (1, 2)
    ]
    last = [work.wait() for work in works]
    done = [work.is_completed() for work in works]
    return sent, last, done, [int(td["a", "x"]) for td in into], [int(td["b"].sum()) for td in into]


@pytest.mark.parametrize("consolidated", [False, True])
def test_both_can_send_at_once_and_transfers_keep_their_order(ranks, consolidated):
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


def test_tags_tell_transfers_apart(ranks):
    assert ranks.run(tags, 2, False)[1] == ([9, 6], 1, 2)
    (later, earlier), one, two = ranks.run(tags, 2, True)[1]
    assert (one, two) == (1, 2) and abs(later - earlier) > 1000


def in_groups(rank):
    """Ranks 1 and 3 as a group that torch knows, and as one that it does not."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    found = []
    ours = {1: 0, 3: 1}[rank]
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    own = dist.ProcessGroupGloo(store, ours, 2)
    for way in (dict(group=group), dict(group=own)):
        for consolidated in (False, True):
            td = kind("shared row", rank).consolidate()
            if rank == 1:
                td.send(group_dst=1, consolidated=consolidated, **way)
            else:
                td.recv(group_src=0, consolidated=consolidated, **way)
            found.append(int(td["b"].sum()) // 70_000)
    td = kind("shared row", rank)
    td.send(3, group=group) if rank == 1 else td.recv(1, group=group)
    td.all_reduce(group=group)
    return found, int(td["a", "x"]), shown(td.broadcast(3, group=group)) == shown(td)


def test_groups_and_ranks_in_them(ranks):
    assert ranks.run(in_groups, 4) == [None, ([1] * 4, 2, True), None, ([1] * 4, 2, True)]


def kept_apart(rank, first, second, consolidated=False):
    """What the receiver is told, what it holds then, and that the next transfer works."""
    td = (first if rank == 0 else second)()
    told = None
    if rank == 0:
        td.send(1, consolidated=consolidated)
    else:
        before = shown(td)
        try:
            td.recv(0)
        except ValueError as error:
            told = str(error)
        assert shown(td) == before
    fine = kind("shared row", 3 if rank == 0 else 0)
    fine.send(1) if rank == 0 else fine.recv(0)
    return told, int(fine["b"].sum())


def base():
    return TensorDict(a=torch.ones(3), n=TensorDict(b=torch.ones(2)))


def other_key():
    return TensorDict(a=torch.ones(3), n=TensorDict(c=torch.ones(2)))


def other_shape():
    return TensorDict(a=torch.ones(4), n=TensorDict(b=torch.ones(2)))


def other_dtype():
    return TensorDict(a=torch.ones(3), n=TensorDict(b=torch.ones(2).int()))


def with_large():
    return base().set("z", torch.ones(100_000))


def with_value():
    return base().set_non_tensor("s", 3)


def other_value():
    return base().set_non_tensor("s", 4)


def stacked():
    return lazy_stack([base(), base()])


def dense():
    return raffia.stack([base(), base()])


@pytest.mark.parametrize(
    "first, second, consolidated, told",
    [
        (other_key, base, False, "'n.b' only here; 'n.c' only there"),
        (other_shape, base, False, r"'a' is float32 \[4\] there, float32 \[3\] here"),
        (other_dtype, base, False, r"'n.b' is int32 \[2\] there, float32 \[2\] here"),
        (with_large, base, False, "'z' only there"),
        (base, with_large, False, "'z' only here"),
        (with_value, other_value, False, "'s' is the value 3 there, the value 4 here"),
        (stacked, dense, False, "'0.a' only there"),
        (base, TensorDict, False, "'a' only there; 'n.b' only there"),
        (base, base, True, "sent with consolidated=True, but here it is False"),
        (with_large, TensorDict, True, "sent with consolidated=True, but here it is False"),
    ],
)
def test_unlike_trees_are_an_error_that_names_what_differs(
    ranks, first, second, consolidated, told
):
    (none, _), (found, total) = ranks.run(kept_apart, 2, first, second, consolidated)
    pytest.raises(ValueError, raise_, found).match(told)
    assert none is None and total == 210_000


def raise_(text):
    raise ValueError(text)


def blocks(rank):
    a, b = torch.ones(4), torch.zeros(4)
    td = (TensorDict(a=a, b=b) if rank == 0 else TensorDict(b=b, a=b)).consolidate()
    try:
        td.send(1, consolidated=True) if rank == 0 else td.recv(0, consolidated=True)
    except ValueError as error:
        return str(error)


def test_blocks_of_another_order_are_told(ranks):
    assert "'a' is float32 [4] at byte 0 there, float32 [4] at byte 16 here" in ranks.run(blocks)[1]


def premature(rank):
    if rank == 0:
        return base().send(1)
    (work,) = other_shape().irecv(0, return_premature=True)
    try:
        work.wait(timeout=30)
    except ValueError as error:
        return str(error)


def test_what_goes_wrong_under_way_is_raised_by_wait(ranks):
    assert "recv: what rank 0 sent does not fit: 'a' is" in ranks.run(premature)[1]


def test_arguments_that_mean_no_line():
    td = base()
    with pytest.raises(ValueError, match="pass dst, a rank .* got dst=None and group_dst=None"):
        td.send()
    with pytest.raises(ValueError, match="got src=0 and group_src=1"):
        td.recv(0, group_src=1)
    with pytest.raises(
        ValueError, match="irecv: group_src=1 is a rank within a group: pass the group too"
    ):
        td.irecv(group_src=1)
    with pytest.raises(TypeError, match="isend: dst must be a rank, which is a number, got str"):
        td.isend("elsewhere")
    with pytest.raises(ValueError, match="pass dst, the rank of the receiver"):
        td.init_remote()


def test_entries_without_plain_memory_are_refused():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for leaf, told in [
        (rows, "entry 'n.a' is a nested tensor.*init_remote and broadcast send jagged ones"),
        (torch.eye(2).to_sparse(), "entry 'n.a' is of torch.float32 and torch.sparse_coo"),
        (torch.empty(2, device="meta"), "entry 'n.a' has no memory"),
    ]:
        with pytest.raises(TypeError, match=told):
            messages.layout(TensorDict(n=TensorDict(a=leaf)), "send")


# ------------------------------------------------------------------------------- to who has none


def whole():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict(a=torch.arange(6.0).view(2, 3), text="word", batch_size=[2], names=["time"])
    td["pair"] = Pair(x=torch.ones(2), y=torch.zeros(2, 1), name="p", batch_size=[2])
    td["lazy"] = lazy_stack([TensorDict(k=torch.ones(1)), TensorDict(k=torch.ones(2), j=2)])
    td["rows"] = rows
    td["none"] = TensorDict(batch_size=[2])
    return td


def described(td):
    td.get("pair")
    return (
        repr(td).replace(str(td.is_shared()), ""),
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
def test_a_container_is_made_from_what_is_sent(ranks, use_broadcast):
    sent, taken = ranks.run(remote, 2, use_broadcast)
    assert taken[1:] == sent[1:] and taken[-1][0] == ["time"]


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


def test_what_was_made_takes_the_next_as_one_block(ranks):
    assert ranks.run(remote_then_block)[1] == ("Pair", True, [0, 0], [1, 1])


def changed_since(rank):
    """A container that is one block, with entries in other places of it than it had."""
    td = TensorDict(a=torch.ones(4), b=torch.zeros(4)).all_gather()[0]
    if rank == 1:
        return shown(TensorDict.from_remote_init(0)), shown(TensorDict.from_remote_init(0))
    td["a"], td["b"] = td["b"], td["a"]
    assert td.is_consolidated()
    td.init_remote(1)
    td.del_("a").init_remote(1)


def test_a_changed_block_is_not_sent_as_it_was(ranks):
    ones, zeros = [("torch.float32", [n] * 4) for n in (1.0, 0.0)]
    assert ranks.run(changed_since)[1] == ({"a": zeros, "b": ones}, {"b": ones})


def unsendable(rank, way):
    td = TensorDict(a=torch.ones(2), f=object()) if rank == 0 else TensorDict(a=torch.ones(2))
    try:
        if way == "remote":
            td.init_remote(1) if rank == 0 else TensorDict.from_remote_init(0)
        elif way == "scatter":
            td.scatter(0, [td, td] if rank == 0 else None)
        elif way == "gather_and_stack":
            td.gather_and_stack(1)
        else:
            getattr(td, way)(*[0] * (way == "broadcast"))
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    "way", ["remote", "broadcast", "all_gather", "scatter", "gather_and_stack"]
)
def test_who_cannot_send_tells_the_others(ranks, way):
    (kind_, told), (other_kind, other_told) = ranks.run(unsendable, 2, way)
    assert kind_ == "TypeError" and "'f' is a object" in told
    assert other_kind == "RuntimeError"
    assert "rank 0 could not send its container: entry 'f' is a object" in other_told


def coroutines(rank):
    async def program():
        if rank == 0:
            for fill in (1.0, 2.0):
                await TensorDict(a=torch.full((2,), fill)).asend(1)
            return None
        first = await TensorDict().arecv(0)
        before = first["a"]
        second = await first.arecv(0)
        return second is first, before.tolist()

    return asyncio.run(program())


def test_coroutines(ranks):
    assert ranks.run(coroutines)[1] == (True, [2, 2])


# ----------------------------------------------------------------------------------- all together


def reduced(rank, name, how, options):
    td = kind(name, rank + 1)
    if how == "broadcast":
        return shown(td.broadcast(2))
    given = getattr(td, how)(*[1] * (how == "reduce"), **options)
    if given is not None:
        for work in given:
            work.wait()
    return len(given or []), shown(td)


OPTIONS = [
    {},
    {"bucket_bytes": 1},
    {"bucket_bytes": 2**20},
    {"async_op": True},
    {"async_op": True, "bucket_bytes": 100},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_sums_are_in_all_processes(ranks, name, options):
    if name == "all":
        name = "shared row"
    found = ranks.run(reduced, 4, name, "all_reduce", options)
    assert [sums for _, sums in found] == [shown(kind(name, 10))] * 4
    assert all([bool(num) == ("async_op" in options) for num, _ in found])


@pytest.mark.parametrize("options", [*OPTIONS[:3], dict(async_op=True, return_premature=True)])
@pytest.mark.parametrize("name", ["shared row", "lazy", "class"])
def test_sums_are_in_one_process(ranks, name, options):
    found = ranks.run(reduced, 4, name, "reduce", options)
    assert found[1][1] == shown(kind(name, 10))
    assert [bool(num) for num, _ in found] == ["return_premature" in options] * 4


def other_ops(rank):
    td = TensorDict(a=torch.tensor([rank, -rank]), b=torch.eye(2).t()[:, :1] * rank)
    td.all_reduce(dist.ReduceOp.MAX)
    half = TensorDict(
        a=torch.ones(3, dtype=torch.bfloat16), c=torch.full((2,), 1j), e=torch.ones(0)
    )
    half.all_reduce()
    return td["a"].tolist(), td["b"].tolist(), half["a"].sum().item(), half["c"][0].item()


def test_other_reductions_and_dtypes(ranks):
    assert ranks.run(other_ops, 4) == [([3, 0], [[3.0], [0.0]], 12.0, 4j)] * 4


def test_buckets_hold_small_leaves_of_one_dtype():
    leaves = [
        torch.zeros(n, dtype=d) for n, d in ((4, torch.float), (8, torch.int), (4, torch.float))
    ]
    leaves += [torch.zeros(2**16), torch.zeros(0)]
    sizes = [[len(x) for x in bucket] for bucket in collectives.buckets(leaves, 2**18, 2**20)]
    assert sizes == [[4, 4], [8], [2**16]]
    assert [[len(x) for x in b] for b in collectives.buckets(leaves, 2**20, 32)] == [
        [4, 4], [8], [2**16]
    ]  # fmt: skip
    assert len(collectives.buckets(leaves, 1, 1)) == 4
    with pytest.raises(ValueError, match="all_reduce: bucket_bytes=0 must be above 0"):
        collectives.reductions(leaves, 0, print, "all_reduce", torch.device("cpu"), True)


def disagree(rank, how, odd, makes):
    td = makes[rank == odd]()
    try:
        getattr(td, how)(*[0] * (how != "all_reduce"))
        told = None
    except Exception as error:
        told = type(error).__name__, str(error)
    fine = TensorDict(a=torch.ones(2))
    fine.all_reduce()
    return told, fine["a"].tolist()


def sparse():
    return TensorDict(a=torch.eye(2).to_sparse())


@pytest.mark.parametrize("how", ["all_reduce", "reduce", "gather_and_stack"])
def test_unlike_trees_are_an_error_in_all_processes(ranks, how):
    for told, fine in ranks.run(disagree, 4, how, 2, (base, other_shape)):
        first = 1 if how == "gather_and_stack" else 0
        assert told[0] == "ValueError"
        assert f"containers of ranks {first} and 2 differ" in told[1]
        assert f"'a' is float32 [3] on rank {first}, float32 [4] on rank 2" in told[1]
        assert fine == [4, 4]


def test_who_cannot_sum_tells_the_others(ranks):
    found = ranks.run(disagree, 4, "all_reduce", 1, (base, sparse))
    assert [kind for (kind, _), _ in found] == [
        "ValueError",
        "TypeError",
        "ValueError",
        "ValueError",
    ]
    assert all(["entry 'a' is of torch.float32" in told for (_, told), _ in found])
    assert "rank 1 can't take part" in found[0][0][1]
    found = ranks.run(disagree, 2, "all_reduce", -1, (sparse, sparse))
    assert [kind for (kind, _), _ in found] == ["TypeError", "TypeError"]


def test_sums_leave_values_alone(ranks):
    assert ranks.run(disagree, 2, "all_reduce", 1, (with_value, other_value))[0] == (None, [2, 2])


@pytest.mark.parametrize("name", KINDS)
def test_all_have_what_one_has(ranks, name):
    assert ranks.run(reduced, 4, name, "broadcast", {}) == [shown(kind(name, 3))] * 4


def broadcast_itself(rank):
    block = base().consolidate()
    plain = base()
    copy = plain.broadcast(0)
    return block.broadcast(0) is block, copy is plain, copy.is_consolidated()


def test_the_sender_gets_its_block_itself(ranks):
    assert ranks.run(broadcast_itself) == [(True, False, True), (False, False, True)]


def gathered(rank):
    td = TensorDict(a=torch.full((rank,), rank), r=f"rank {rank}")
    if rank == 2:
        td["more"] = TensorDict(x=torch.ones(100, dtype=torch.float64))
    found = td.all_gather()
    for one in found:
        for leaf in one._leaves([]):
            leaf += 0  # it is memory that can be written into
    return [(one["r"], one["a"].tolist(), sorted(map(str, one.keys()))) for one in found]


def test_all_have_what_each_has(ranks):
    expected = [(f"rank {rank}", [rank] * rank, ["a", "r"]) for rank in range(4)]
    expected[2][2].insert(1, "more")
    assert ranks.run(gathered, 4) == [expected] * 4


def gather_rows(rank, name):
    dst = 1
    rows = (
        raffia.stack([kind(name, 0)] * 3) if name != "class" else torch.stack([kind(name, 0)] * 3)
    )
    td = rows if rank == dst else kind(name, rank + 1)
    td = td.lock_()
    given = td.gather_and_stack(dst)
    return None if given is None else (given is td, shown(td))


@pytest.mark.parametrize("name", ["all", "class"])
def test_rows_of_the_others_are_stacked(ranks, name):
    found = ranks.run(gather_rows, 4, name)
    expected = shown(torch.stack([kind(name, fill) for fill in (1, 3, 4)]))
    assert found == [None, (True, expected), None, None]


def gather_too_many(rank):
    try:
        return TensorDict(a=torch.ones(2), batch_size=[2]).gather_and_stack(0)
    except ValueError as error:
        return str(error)


def test_rows_must_have_room(ranks):
    told, none = ranks.run(gather_too_many)
    assert "1 other processes sent a row each, but the batch size here is [2]" in told
    assert none is None


def scattered(rank, num):
    tds = [TensorDict(a=torch.full((i,), i), i=f"{i}") for i in range(num)]
    try:
        td = TensorDict().scatter(1, tds if rank == 1 else None, device="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return td["a"].tolist(), td["i"], td.is_consolidated()


def test_each_gets_its_own(ranks):
    expected = [([i] * i, f"{i}", True) for i in range(4)]
    assert ranks.run(scattered, 4, 4) == expected
    first, second = ranks.run(scattered, 2, 3)
    told = "scatter: 2 processes take one container each, got 3: pass a list of 2 at rank 1"
    assert second == f"ValueError: {told}"
    assert first.startswith("RuntimeError: ") and first.endswith(f"its container: {told}")


# ------------------------------------------------------------------------------- the harness itself


def hangs(rank):
    if rank == 0:
        import time

        time.sleep(60)


def dies(rank):
    if rank == 0:
        import os

        os.abort()


@pytest.mark.slow
def test_ranks_that_hang_or_die_are_found(ranks):
    with pytest.raises(AssertionError, match="rank 0 is not done after 0.5 seconds"):
        ranks.run(hangs, 2, seconds=0.5)
    with pytest.raises(AssertionError, match="rank 0, exit code -6"):
        ranks.run(dies)
    assert ranks.run(broadcast_itself, 1) == [(True, False, True)]
