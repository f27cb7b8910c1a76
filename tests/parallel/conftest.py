"""Groups of processes that live as long as the session, and tiny checkpoints whose heads can be shared out."""

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from processes import Group


@pytest.fixture(scope="session")
def group():
    """`group(n)`: n connected processes."""
    made = functools.cache(Group)
    yield made
    for size in (2, 4):
        made(size).stop()


@pytest.fixture(scope="session")
def targets(make_target):
    """`targets(kv_heads, tied, ...)`: a folder; 4 query heads, 4 layers."""

    @functools.cache
    def target(kv_heads, tied=False, **options):
        heads = {"head_dim": 16, "num_key_value_heads": kv_heads, "num_hidden_layers": 4}
        return str(make_target(10 * kv_heads + tied, tie_word_embeddings=tied, **heads | options))

    return target


@pytest.fixture(scope="session")
def drafter(make_drafter):
    """A drafter for all of them, with a layer a stage."""
    taps = {"mask_token_id": 96, "target_layer_ids": [0, 2, 3]}
    return str(make_drafter(77, num_hidden_layers=4, num_target_layers=4, dflash_config=taps))
