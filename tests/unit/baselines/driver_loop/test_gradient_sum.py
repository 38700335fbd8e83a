"""Gradients as flat arrays: cut, added, joined, and put back where they belong."""

import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl import Config, ModelSpec
from spark_dl.baselines.driver_loop import loop as driver_loop
from spark_dl.baselines.driver_loop.gradient_sum import (
    GradientSum,
    add,
    check_real,
    flat_gradient,
    from_arrays,
    join,
    set_gradient,
    to_arrays,
    trained,
)
from spark_dl.spec import Run


def make_part(rank, size, dtype):
    """Whole numbers, whose sums are exact. Each rank uses a parameter of its own."""
    rng = np.random.default_rng((rank, size))
    gradient = rng.integers(-99, 99, size).astype(dtype)
    buffers = [np.frombuffer(b"of rank 0", dtype=np.uint8)] if rank == 0 else None
    return GradientSum(gradient, float(rank), np.arange(5) == rank, buffers)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("num_ranks", "size"), itertools.product([1, 2, 3, 4, 7], [0, 1, 2, 3, 6, 7, 8, 1000, 1001, 1023])
)
def test_blocks_added_in_any_order_and_joined_are_the_sum(num_ranks, size, dtype):
    expected = sum(make_part(rank, size, dtype).gradient for rank in range(num_ranks))
    for order in list(itertools.permutations(range(num_ranks)))[:6]:
        blocks = {}
        for rank in order:
            cut = list(make_part(rank, size, dtype).cut(num_ranks))
            assert [k for k, _ in cut] == list(range(num_ranks))
            sizes = [len(block.gradient) for _, block in cut]
            assert max(sizes) - min(sizes) <= 1
            for k, block in cut:
                blocks.setdefault(k, []).append(block)
        sums = [(k, functools.reduce(add, found)) for k, found in blocks.items()]
        total = join(sums[::-1])
        assert total.gradient.dtype == dtype
        assert np.array_equal(total.gradient, expected)
        assert total.loss_sum == sum(range(num_ranks))
        assert np.array_equal(total.used, np.arange(5) < num_ranks)
        assert total.buffers[0].tobytes() == b"of rank 0"


def test_parts_are_added_in_place_also_after_they_were_pickled():
    parts = [pickle.loads(pickle.dumps(make_part(rank, 8, "float32"), 5)) for rank in range(3)]
    total = functools.reduce(add, parts)
    assert total is parts[0]
    assert total.gradient is parts[0].gradient


DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_tensors_of_any_dtype_travel_as_bytes(shape):
    tensors = [(torch.rand(shape) * 9).to(getattr(torch, dtype)) for dtype in DTYPES]
    arrays = pickle.loads(pickle.dumps(to_arrays(tensors), 5))
    copies = [torch.zeros_like(t) for t in tensors]
    from_arrays(arrays, copies)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_tensors_that_do_not_lie_end_to_end_travel_as_they_are():
    tensor, copy = torch.arange(6.0).reshape(2, 3).T, torch.zeros(2, 3).T
    from_arrays(to_arrays([tensor]), [copy])
    assert torch.equal(tensor, copy)
    with pytest.raises(ValueError, match="shorter"):
        from_arrays(to_arrays([tensor, tensor]), [copy])


@pytest.mark.parametrize(("dtype", "flat_dtype"), [
    (torch.float32, "float32"), (torch.float64, "float64"), (torch.bfloat16, "float32"),
])  # fmt: skip
def test_gradients_come_back_to_their_parameters(dtype, flat_dtype):
    def build():
        model = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)])
        model[0].weight.requires_grad_(False)
        model[1].to(dtype)
        return model

    one, two, whole = build(), build(), build()
    for model, used in ((one, ("0.bias", "1.weight")), (two, ("1.weight", "1.bias"))):
        for name in used:
            parameter = model.get_parameter(name)
            parameter.grad = torch.randint(-9, 9, parameter.shape).to(parameter.dtype)
    parts = [GradientSum(gradient, 0.0, used) for gradient, used in (flat_gradient(trained(m)) for m in (one, two))]
    assert [p.gradient.dtype for p in parts] == [flat_dtype] * 2
    set_gradient(add(*parts), trained(whole))
    for name, parameter in whole.named_parameters():
        grads = [m.get_parameter(name).grad for m in (one, two) if m.get_parameter(name).grad is not None]
        assert (parameter.grad is None) == (not grads), name
        if grads:
            assert parameter.grad.dtype == parameter.dtype
            assert torch.equal(parameter.grad, sum(grads)), name


def test_a_sparse_gradient_is_refused():
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"spec\.build: a parameter has a sparse gradient"):
        flat_gradient(trained(model))


def test_complex_parameters_are_refused_with_another_way():
    model = nn.Linear(2, 2, dtype=torch.cfloat)
    with pytest.raises(
        ValueError, match=r"^spec\.build: the parameter weight is torch\.complex64, .*parallel\.strategy"
    ):
        check_real(model)
    check_real(model.requires_grad_(False))


def test_the_driver_looks_for_complex_parameters_before_it_starts_anything():
    run = Run(
        spec=ModelSpec(build=lambda: nn.Linear(2, 2, dtype=torch.cfloat)),
        config=Config(),
        train=None,
        run_dir="/nowhere",
    )
    with pytest.raises(ValueError, match=r"the parameter weight is torch\.complex64"):
        driver_loop._parallelize(None, run, None)
