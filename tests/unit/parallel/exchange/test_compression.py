"""What compression sends of a gradient, and what it leaves for later, without ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from spark_dl import DDP
from spark_dl.parallel.exchange.compression import (
    add_above,
    add_largest,
    is_worthwhile,
    largest,
    orthonormal,
    take_above,
    take_largest,
)
from spark_dl.parallel.exchange.exchange import build_exchange
from spark_dl.world import World

SIZES = [1, 2, 3, 7, 64, 1000, 70_001]


def gradient(size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [1e-6, 0.25, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_above_the_threshold_is_sent_as_the_threshold_with_its_sign(size, threshold, dtype):
    before = gradient(size, dtype)
    residual = before.clone()
    taken = take_above(residual, threshold)
    sent = torch.zeros_like(before)
    add_above(taken, sent, threshold)
    tau = torch.tensor(threshold, dtype=dtype)
    expected = torch.where(before > threshold, tau, torch.where(before < -threshold, -tau, torch.zeros_like(tau)))
    assert torch.equal(sent, expected)
    assert torch.equal(residual, before - expected)
    assert taken.dtype == torch.int32
    assert len(taken) == int((before.abs() > threshold).sum())  # 4 bytes each


def test_an_index_and_a_sign_are_packed_into_32_bits():
    residual = torch.tensor([0.0, -2.0, 2.0, -0.5, 2.0])
    assert take_above(residual, 1.0).tolist() == [~1, 2, 4]
    assert residual.tolist() == [0.0, -1.0, 1.0, -0.5, 1.0]
    last = 2**31 - 1
    assert torch.tensor([last, ~last], dtype=torch.int64).to(torch.int32).tolist() == [last, -(2**31)]


@pytest.mark.sampled(21)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_largest_are_sent_and_nothing_is_lost(size, ratio, dtype):
    before = gradient(size, dtype)
    residual, count = before.clone(), math.ceil(ratio * size)
    taken = take_largest(residual, count)
    sent = torch.zeros_like(before)
    add_largest(taken, sent)
    assert (taken.dtype, len(taken)) == (torch.int32, 2 * count)  # 8 bytes each
    assert torch.equal(sent + residual, before)
    assert int((sent != 0).sum()) == count
    left = before.abs()[sent == 0]
    assert not len(left) or float(sent[sent != 0].abs().min()) >= float(left.max()) * (1 - 1e-6)


def many(kind):
    size = 600_000
    if kind == "normal":
        return gradient(size).abs()
    if kind == "equal":
        return torch.ones(size)
    if kind == "sparse":  # fewer than are wanted differ from zero
        return torch.zeros(size).index_fill_(0, torch.arange(0, size, 50_000), 3.0)
    if kind == "where the sample looks":
        values = torch.zeros(size)
        values[:: size // 65536 | 1] = 1.0
        return values + 0.5 * gradient(size).abs()
    values = gradient(size).abs()
    values[:: size // 65536 | 1] = 0.0  # where the sample does not look
    return values


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["normal", "equal", "sparse", "where the sample looks", "where it does not"])
@pytest.mark.parametrize("count", [1, 600, 6_000, 60_000, 599_999, 600_000])
def test_the_search_by_a_sample_finds_the_largest(kind, count):
    sizes = many(kind)
    found = largest(sizes, count)
    assert len(found.unique()) == count
    assert torch.equal(sizes[found].sort().values, sizes.topk(count).values.sort().values)


@pytest.mark.parametrize(("shape", "rank", "expected"), [
    ((), 1, False), ((10,), 1, False), ((2, 2), 1, False), ((4, 4), 1, True), ((4, 4), 2, False),
    ((100, 100), 25, True), ((100, 100), 26, False), ((64, 3, 7, 7), 4, True), ((1, 1000), 1, False),
    ((0, 5), 1, False),
])  # fmt: skip
def test_only_matrices_of_which_the_factors_are_at_most_half_become_products(shape, rank, expected):
    assert is_worthwhile(shape, rank) == expected


@pytest.mark.parametrize("matrix", [
    gradient(12).view(6, 2), torch.zeros(6, 2), torch.ones(6, 2), 1e-20 * gradient(12).view(6, 2),
    gradient(12, torch.bfloat16).view(6, 2),
], ids=["any", "zeros", "one direction", "tiny", "bfloat16"])  # fmt: skip
def test_columns_become_orthonormal_whatever_they_were(matrix):
    q = orthonormal(matrix)
    assert q.dtype == matrix.dtype
    torch.testing.assert_close(
        q.T.float() @ q.float(), torch.eye(2), atol=0.02 if q.dtype != torch.float32 else 1e-5, rtol=0
    )


@pytest.mark.parametrize("compression", ["threshold", "topk", "powersgd"])
def test_complex_weights_are_not_compressed(compression):
    model = torch.nn.Linear(1, 1, dtype=torch.complex64)
    world = World(0, 1, 0, 1, "host", torch.device("cpu"), dist.HashStore())
    with pytest.raises(ValueError, match=f"parallel.compression: found '{compression}' with complex weights .'weight'"):
        build_exchange(model, world, DDP(compression=compression), timeout_s=5)
