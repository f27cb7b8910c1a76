"""Placements to collectives, and reductions over a vocabulary in parts."""

import pytest

MESHES = [{"kv": 2}, {"kv": 4}, {"kv": 2, "rep": 2}, {"kv": 2, "rep": 1}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_crossing(group, sizes):
    size = sizes["kv"] * sizes.get("rep", 1)
    for wrong in group(size).crossings(sizes):
        assert not wrong


def test_crossings_that_do_not_exist(group):
    assert "no collective makes" in group(2).refused("refused_crossing", {"kv": 2}, {"kv": "S"}, {"kv": "P"})[0]
    assert "dimension 'ep'; the mesh has kv" in group(2).refused("refused_crossing", {"kv": 2}, {"ep": "S"}, {})[0]


@pytest.mark.parametrize("sizes", [(20, 20), (13, 12), (25, 24, 24, 24), (8, 8, 8, 1)], ids=str)
@pytest.mark.parametrize("k", [1, 6])
def test_vocabulary_in_parts(group, sizes, k):
    """NaN, ties over two parts, infinities, more candidates than a part has."""
    for wrong in group(len(sizes)).vocabulary(sizes, k):
        assert not wrong


def test_symmetric_sums_keep_their_place_in_compiled_code(group):
    """Graphs of different stages may be fused differently: what is no collective to inductor may be moved past one."""
    for order, results in group(2).order_in_compiled_code():
        sums = ["symmetric_all_reduce", "all_gather_into_tensor", "sum_add_norm", "symmetric_all_reduce"]
        assert order == [*sums, "broadcast_"]
        assert results[:4] == [[6.0] * 4, [1.0] * 4 + [2.0] * 4, [2.0] * 4, [6.0] * 4]
