"""Processes beside each other: each piece of work in one of them, and what they found in the first."""

import pytest

from parallel import process
from parallel.beside import Beside


def test_alone():
    beside = Beside("test")
    assert list(beside.turns(3)) == [0, 1, 2] and beside.gathered("found") == ["found"]


def test_pieces_are_shared(group):
    turns, found = zip(*group(3).beside(20), strict=True)
    assert sorted(turn for mine in turns for turn in mine) == list(range(20))
    assert found == (list(turns), None, None)


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_description_that_is_incomplete_is_named(missing, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    process.shared_store.cache_clear()
    with pytest.raises(ValueError, match=f"{missing} not set: start them with torchrun"):
        Beside("test")
