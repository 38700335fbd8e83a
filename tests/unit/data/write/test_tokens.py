"""Packs: each text is in one of them, whole, and they are nearly full."""

import numpy as np
import pytest

from spark_dl.data.write.tokens import pack_lengths


@pytest.mark.parametrize("most", [1, 7, 64])
@pytest.mark.parametrize("n", [0, 1, 30, 2000])
def test_each_text_is_in_one_pack_that_has_room_for_it(n, most):
    lengths = np.random.default_rng(n).integers(1, most + 1, n)
    packs = pack_lengths(lengths, most)
    assert sorted(text for texts in packs for text in texts) == [*range(n)]
    full = [int(lengths[texts].sum()) for texts in packs]
    assert all(0 < tokens <= most for tokens in full)
    room = [most - tokens for tokens in full]
    last = [int(lengths[texts[0]]) for texts in packs]
    assert all(last[i] > room[j] for i in range(len(packs)) for j in range(i)), "a text that would have fit elsewhere"


def test_packs_are_nearly_full():
    lengths = np.clip(np.random.default_rng(0).lognormal(3.6, 0.7, 5000), 5, 256).astype(int)
    assert lengths.sum() / (512 * len(pack_lengths(lengths, 512))) > 0.99


def test_longer_texts_are_an_error():
    with pytest.raises(ValueError, match="found a text of 9 tokens, expected at most length=8; cut or drop"):
        pack_lengths(np.array([3, 9, 8]), 8)
