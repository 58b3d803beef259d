"""Memory that searches reuse: nothing leaks from one into another."""

import threading

import torch

from raffia.search import RecurrentOutput, RootOutput, search
from raffia.search.memory import CACHE_LIMIT, LARGE, Arena, new_memory

WIDE = LARGE // 4 // 8  # numbers in a row, so that eight rows fill a large page


def counted(embedding, action):
    rows = len(action)
    output = RecurrentOutput(action.float(), torch.zeros(rows), torch.zeros(rows, 2))
    return output, embedding + 1


def plan(**options):
    root = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, WIDE))
    return search(root, counted, num_simulations=9, **options)


def test_returned_embeddings_survive_the_next_search():
    tree = plan(keep_embeddings=True)
    before = tree.embeddings.clone()
    plan()
    assert torch.equal(tree.embeddings, before)
    assert torch.equal(before[0, :, 0], tree.data["depth"][0].float())


def test_an_arena_is_reused_only_after_its_release():
    like = [((8, WIDE), torch.zeros(1)), ((3,), torch.zeros(1, dtype=torch.int64))]
    first, second = Arena(like), Arena(like)
    addresses = [tensor.data_ptr() for tensor in first.tensors]
    assert addresses[0] != second.tensors[0].data_ptr()
    first.release()
    third = Arena(like)
    assert [tensor.data_ptr() for tensor in third.tensors] == addresses
    assert [tensor.dtype for tensor in third.tensors] == [torch.float32, torch.int64]


def test_a_nested_search_does_not_share_memory():
    inner = []

    def nested(embedding, action):
        inner.append(plan(keep_embeddings=True).embeddings[0, :, 0])
        return counted(embedding, action)

    root = RootOutput(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, WIDE))
    tree = search(root, nested, num_simulations=5, keep_embeddings=True)
    assert torch.equal(tree.embeddings[0, :, 0], tree.data["depth"][0].float())
    assert all(torch.equal(other, inner[0]) for other in inner)


def test_each_thread_has_its_arenas():
    like, addresses = [((8, WIDE), torch.zeros(1))], []

    def make():
        arena = Arena(like)
        addresses.append(arena.tensors[0].data_ptr())
        arena.release()

    make()
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    make()
    assert addresses[0] == addresses[2] != addresses[1]


def test_very_large_arenas_are_not_cached():
    arena = Arena([((CACHE_LIMIT + 1,), torch.zeros(1, dtype=torch.uint8))])
    arena.release()
    assert Arena([((LARGE,), torch.zeros(1, dtype=torch.uint8))]).tensors[0].shape == (LARGE,)


def test_new_memory_equals_torch_empty_except_for_its_pages():
    for shape in ((0, 3), (2, 3), (LARGE,)):
        tensor = new_memory(shape, torch.int32)
        assert tensor.shape == shape and tensor.dtype == torch.int32
        assert tensor.fill_(7).eq(7).all()
