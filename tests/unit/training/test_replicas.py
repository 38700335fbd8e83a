"""The hash of a tensor's bits, and who differs from whom."""

import pytest
import torch

from spark_dl.training.checks import Drift, ReplicaCheck, find_drift, fingerprint

A, B = ("a", ""), ("b", "")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2**18 + 7,), ()], ids=str)
def test_F23_a_change_of_one_element_changes_the_hash_and_nothing_else_does(dtype, shape):
    torch.manual_seed(0)
    tensor = (100 * torch.randn(shape)).to(dtype)
    before = int(fingerprint(tensor))
    assert int(fingerprint(tensor.clone())) == before
    for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
        changed = tensor.clone()
        flat = changed.view(-1)
        flat[at] = ~flat[at] if dtype == torch.bool else flat[at] + 1
        assert int(fingerprint(changed)) != before


def test_F23_the_smallest_changes_and_swaps_are_seen():
    tensor = torch.ones(1000)
    before = int(fingerprint(tensor))
    next_up = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    up, down, swapped, mirrored, signed = (tensor.clone() for _ in range(5))
    up[3] = next_up
    down[3], down[4] = next_up, torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))  # whose sum of bits is the same
    swapped[0], swapped[1] = 2.0, 1.0
    mirrored[0], mirrored[1] = 1.0, 2.0
    signed[5:7] *= -1
    hashes = [int(fingerprint(t)) for t in (up, down, swapped, mirrored, signed)]
    assert len({before, *hashes}) == 6


def test_F23_zeros_of_both_signs_differ_and_memory_formats_do_not():
    images = torch.randn(2, 3, 4, 5)
    assert int(fingerprint(torch.tensor([0.0]))) != int(fingerprint(torch.tensor([-0.0])))
    assert int(fingerprint(images)) == int(fingerprint(images.contiguous(memory_format=torch.channels_last)))
    assert int(fingerprint(torch.zeros(0))) == 0


@pytest.mark.parametrize(("found", "expected"), [
    ([{A: 1, B: 2}] * 3, None),
    ([{A: 1}, {B: 2}], None),  # ranks with different parts
    ([{A: 1, B: 2}, {A: 1, B: 3}, {A: 1, B: 2}], Drift("b", [1], [0, 2], 1)),
    ([{A: 1, B: 2}, {A: 4, B: 2}, {A: 4, B: 3}], Drift("a", [0], [1, 2], 2)),
    ([{A: 1}, {A: 2}], Drift("a", [0, 1], [], 1)),
    ([{A: 1}, {A: 2}, {A: 3}, {A: 3}], Drift("a", [0, 1], [2, 3], 1)),
    ([{A: 1}, {A: 1}, {A: 3}, {A: 3}], Drift("a", [0, 1, 2, 3], [], 1)),
    ([{A: 1}, {B: 5}, {A: 1}, {B: 6}, {B: 5}], Drift("b", [3], [1, 4], 1)),
])  # fmt: skip
def test_F23_the_ranks_that_differ_from_most_are_named_with_the_first_tensor(found, expected):
    assert find_drift(found) == expected


@pytest.mark.parametrize(("drift", "same_in", "checkpoint", "texts"), [
    (Drift("w", [1], [0, 2], 3), 4, "/run/7", ["rank 1 on b has other bits of 'w' than ranks 0, 2. 3 tensor(s) differ",
     ", which were the same in step 4. ", "the last checkpoint is /run/7"]),
    (Drift("w", [1, 2], [0], 1), None, None, ["rank 1 on b and rank 2 on c have other bits of 'w' than rank 0. 1 te",
     "differ. Something", "no checkpoint has been saved yet"]),
    (Drift("w", [0, 1], [], 1), None, None, ["rank 0 on a and rank 1 on b have different bits of 'w', and which of"]),
])  # fmt: skip
def test_a_difference_is_told_with_its_ranks_hosts_and_the_last_checkpoint(drift, same_in, checkpoint, texts):
    check = object.__new__(ReplicaCheck)
    check._hosts, check._same_in = ["a", "b", "c"], same_in
    told = check._explain(drift, 6, checkpoint)
    assert told.startswith("the replicas of the model differ after step 6: ")
    assert [text for text in texts if text not in told] == []
