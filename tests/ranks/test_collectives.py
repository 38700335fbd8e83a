"""Our all-reduces between real processes: sums as the backend's, the same bits on all ranks, and DDP with the hook."""

import contextlib
import datetime
import functools
import pickle
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spark_dl import gather
from spark_dl.parallel.exchange.collectives import ALGORITHMS, all_reduce
from spark_dl.parallel.exchange.exchange import build_all_reduce
from tests.ranks.launcher import run_ranks

LENGTHS = [0, 1, 2, 3, 5, 7, 8, 63, 1000, 40_003]
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64]  # fmt: skip


def run_in_group(fn, world_size, *args):
    """What `fn(*args)` returns on each rank, with gloo between them."""
    return run_ranks(in_group, world_size, fn, *args)


def in_group(fn, *args):
    """NOTE: what `fn` leaves behind is gone before the group. A DDP model that outlives its group ends it with Python's
    lock held, and can wait for ever, as the group's threads may need the lock to free tensors before they end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several per rank would wait for each other on the CPUs that all ranks share
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    try:
        dist.barrier()  # a rank that ends at once would close connections that others are still making
        return fn(*args)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def random_tensor(length, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, (length,), generator=generator).to(dtype)


def same_on_all_ranks(tensor):
    bits = tensor.contiguous().view(-1).view(torch.uint8)
    all_bits = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(all_bits, bits)
    return all(torch.equal(other, bits) for other in all_bits)


def check_sum(sum_in_place, length, dtype):
    """What is wrong with a sum over the ranks, or nothing."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = [random_tensor(length, dtype, seed=length + r) for r in range(world_size)]
    tensor = values[rank].clone()
    sum_in_place(tensor)
    if length and not same_on_all_ranks(tensor):
        return "differs between ranks"
    if dtype.is_floating_point:
        exact = torch.stack(values).double()
        bound = exact.abs().sum(0) * torch.finfo(dtype).eps * world_size
        return "" if bool(((tensor.double() - exact.sum(0)).abs() <= bound).all()) else "far from the sum"
    expected = values[rank].clone()
    if length and dtype != torch.int16:  # which gloo cannot sum
        dist.all_reduce(expected)
    else:
        expected = torch.stack(values).sum(0, dtype=dtype)
    return "" if torch.equal(tensor, expected) else "another sum than the backend's"


def sums(dtypes, lengths):
    """(algorithm, dtype, length, what is wrong) of each sum that is wrong; how many there were."""
    found = [
        (name, str(dtype), length, check_sum(functools.partial(all_reduce, algorithm=name), length, dtype))
        for dtype in dtypes
        for length in lengths
        for name in ALGORITHMS
    ]
    return [case for case in found if case[-1]], len(found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7, 8))])
def test_sums_of_all_lengths(world_size):
    for wrong, count in run_in_group(sums, world_size, [torch.int64, torch.float32], LENGTHS):
        assert wrong == []
        assert count == 2 * len(LENGTHS) * len(ALGORITHMS)


def test_sums_of_all_dtypes():
    for wrong, _ in run_in_group(sums, 3, DTYPES, [0, 1, 4099]):
        assert wrong == []


@pytest.mark.slow
def test_sums_of_many_pieces():
    for wrong, _ in run_in_group(sums, 3, [torch.int32, torch.float32], [1_234_567]):
        assert wrong == []


def sums_in_other_ways():
    """One receive at a time, and receives posted together with sends, as on GPUs."""
    wrong = []
    for name in [name for name in ALGORITHMS if name != "naive"]:
        sum_flat = ALGORITHMS[name].keywords["sum_flat"]
        for options in ({"ahead": 1}, {"in_step": True}, {"in_step": True, "ahead": 1}):
            sum_in_place = functools.partial(sum_flat, group=dist.group.WORLD, **options)
            found = {length: check_sum(sum_in_place, length, torch.int32) for length in (1, 5, 300_001)}
            wrong += [(name, options, length, what) for length, what in found.items() if what]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_sums_with_receives_posted_in_other_ways(world_size):
    assert run_in_group(sums_in_other_ways, world_size) == [[]] * world_size


def sums_of_shapes():
    wrong, rank, world_size = [], dist.get_rank(), dist.get_world_size()
    base = torch.arange(24, dtype=torch.float32)
    shapes = {
        "scalar": lambda: torch.tensor(7.0),
        "matrix": lambda: base.view(4, 6).clone(),
        "transposed": lambda: base.view(4, 6).clone().t(),
        "every other": lambda: base.clone()[::2],
        "channels last": lambda: base.view(1, 2, 3, 4).clone().to(memory_format=torch.channels_last),
        "no columns": lambda: torch.zeros(3, 0),
        "parameter": lambda: nn.Parameter(base.clone()),
    }
    for name in ALGORITHMS:
        for shape, build in shapes.items():
            tensor = build()
            expected, place = tensor.detach() * sum(range(1, world_size + 1)), tensor.data_ptr()
            tensor.data *= rank + 1
            all_reduce(tensor, name)
            if not (torch.equal(tensor.detach(), expected) and tensor.data_ptr() == place):
                wrong.append((name, shape))
        whole = torch.ones(2, 6)
        all_reduce(whole[:, 1:3], name)
        if whole.sum() != 8 + 4 * world_size:
            wrong.append((name, "columns of a matrix"))
    return wrong


def test_sums_of_all_shapes_are_in_place():
    assert run_in_group(sums_of_shapes, 3) == [[]] * 3


def sums_in_groups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2, 3]), dist.new_group([1, 4])]
    found = []
    for name in ALGORITHMS:
        tensor = torch.full((5,), 10**rank)
        all_reduce(tensor, name, groups[rank in (1, 4)])
        found.append(tensor.tolist())
    return found


def test_sums_in_groups():
    for rank, found in enumerate(run_in_group(sums_in_groups, 5)):
        assert found == [[10010 if rank in (1, 4) else 1101] * 5] * len(ALGORITHMS)


def refusals():
    with pytest.raises(ValueError, match="unknown all-reduce algorithm 'rnig'; did you mean 'ring'"):
        all_reduce(torch.ones(3), "rnig")
    with pytest.raises(ValueError, match="unknown all-reduce algorithm 'star'"):
        build_all_reduce("star", timeout_s=5)
    with pytest.raises(ValueError, match=r"torch\.bool"):
        all_reduce(torch.ones(3) > 0, "ring")
    with pytest.raises(ValueError, match=r"torch\.sparse_coo"):
        all_reduce(torch.ones(3).to_sparse(), "naive")


def test_what_cannot_be_summed_is_refused():
    run_in_group(refusals, 2)


def sum_with_a_lost_rank(name):
    all_reduce(torch.ones(10), name)
    if dist.get_rank() == dist.get_world_size() - 1:
        return None
    start = time.monotonic()
    try:
        while True:  # a rank may need nothing of the one that is lost, and hear of it when others leave
            all_reduce(torch.ones(10), name)
    except RuntimeError as error:
        return str(error), time.monotonic() - start


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_lost_rank_is_an_error_that_names_ranks(name):
    *others, _ = run_in_group(sum_with_a_lost_rank, 3, name)
    named = [rf"rank {rank} lost rank (\d or )?2 in an all-reduce: " for rank in range(2)]
    assert any(re.search(pattern, error) for pattern, (error, _) in zip(named, others, strict=True))
    for error, seconds in others:
        assert "in an all-reduce: " in error
        assert seconds < 20


def build_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 3))


def train(wrapped, *, steps=10):
    """Weights after some steps, with two micro-batches in every other step."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        for is_last in (False, True) if step % 2 else (True,):
            x, y = torch.randn(8, 20, generator=generator), torch.randint(0, 3, (8,), generator=generator)
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(wrapped.parameters()).detach()


def our_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("spark_dl")]


def weights_with_hooks(bucket_mib):
    build = functools.partial(DistributedDataParallel, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    expected = train(build(build_model()))
    found = {}
    for name in ALGORITHMS:
        exchange = build_all_reduce(name, timeout_s=20)
        assert our_threads() == []
        wrapped = build(build_model())
        wrapped.register_comm_hook(None, lambda _, bucket, exchange=exchange: exchange.hook(bucket))
        weights = train(wrapped)
        assert our_threads() == ["spark_dl exchange"]
        exchange.close()
        exchange.close()
        assert our_threads() == []
        found[name] = ((weights - expected).abs().max().item(), same_on_all_ranks(weights))
    return found


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("bucket_mib", [0.001, 25], ids=["small buckets", "one bucket"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_with_a_hook_is_that_of_plain_ddp(world_size, bucket_mib):
    for found in run_in_group(weights_with_hooks, world_size, bucket_mib):
        assert found.keys() == ALGORITHMS.keys()
        for difference, is_same in found.values():
            assert difference <= 1e-6
            assert is_same


def late_rank():
    """Rank 1 takes part only when rank 0 says that its own hook has returned."""
    rank, word = dist.get_rank(), torch.zeros(1)
    exchange = build_all_reduce("ring", timeout_s=20)

    def wrapper(_, bucket):
        if rank == 1:
            dist.recv(word, 0)
        future = exchange.hook(bucket)
        if rank == 0:
            assert not future.done()
            dist.send(word, 1)
        return future

    wrapped = DistributedDataParallel(build_model(), bucket_cap_mb=0.001)
    wrapped.register_comm_hook(None, wrapper)
    wrapped(torch.ones(1, 20) * (rank + 1)).sum().backward()
    exchange.close()
    return same_on_all_ranks(next(wrapped.parameters()).grad)


def test_a_hook_returns_before_the_other_ranks_come():
    assert run_in_group(late_rank, 2) == [True, True]


def backward_without_a_peer():
    """The error of each rank when rank 2 closes its hook, and how long it took to come."""
    exchange = build_all_reduce("reduce_broadcast", timeout_s=20)
    wrapped = DistributedDataParallel(build_model())
    wrapped.register_comm_hook(None, lambda _, bucket, exchange=exchange: exchange.hook(bucket))
    for _ in range(2):  # the second begins with DDP's own messages about its buckets
        wrapped(torch.ones(1, 20)).sum().backward()
    dist.barrier()
    start, error = time.monotonic(), ""
    try:
        if dist.get_rank() != 2:
            wrapped(torch.ones(1, 20)).sum().backward()
    except RuntimeError as raised:
        error = str(raised)
    seconds = time.monotonic() - start
    exchange.close()
    assert our_threads() == []
    dist.barrier()
    return error, seconds


def test_an_error_of_the_thread_is_raised_by_backward_of_all_ranks():
    (first, first_s), (second, second_s), _ = run_in_group(backward_without_a_peer, 3)
    assert "rank 0 lost rank 2 in an all-reduce: " in first
    assert "rank 1 lost rank 0 in an all-reduce: " in second
    assert max(first_s, second_s) < 10


def close_while_waiting():
    """Seconds that it took to close a hook whose thread waits for a rank that never comes."""
    exchange = build_all_reduce("tree", timeout_s=60)

    def wrapper(_, bucket):
        exchange.hook(bucket)
        raise KeyError("something else went wrong")

    if dist.get_rank() == 0:
        wrapped = DistributedDataParallel(build_model(), bucket_cap_mb=0.001, init_sync=False)
        wrapped.register_comm_hook(None, wrapper)
        with pytest.raises(Exception, match="something else went wrong"):
            wrapped(torch.ones(1, 20)).sum().backward()
        assert our_threads() == ["spark_dl exchange"]
    start = time.monotonic()
    if dist.get_rank() == 0:
        exchange.close()
    seconds = time.monotonic() - start
    assert our_threads() == []
    dist.barrier()
    exchange.close()
    return seconds


def test_a_hook_whose_thread_waits_can_be_closed():
    assert run_in_group(close_while_waiting, 3)[0] < 15


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def gather_from_a_hostile_rank(path):
    """Rank 1 sends a pickle, and then random bytes, in the place of its JSON. Returns what rank 0 makes of it."""
    generator = torch.Generator().manual_seed(1)
    sent = [pickle.dumps(Canary(path)), b"[" * 100_000, b"\xff\xfe", b""]
    sent += [torch.randint(256, (60,), generator=generator, dtype=torch.uint8).numpy().tobytes() for _ in range(40)]
    found = []
    for data in sent:
        if dist.get_rank() == 1:
            gather._gather_bytes(torch.tensor(list(data), dtype=torch.uint8))
            continue
        try:
            found.append(repr(gather.gather_json({"mine": 1})))
        except (ValueError, RecursionError) as error:
            found.append(type(error).__name__)
    return found, gather.gather_json({"rank": dist.get_rank()})


def test_S08_what_a_hostile_rank_sends_to_a_gather_is_read_as_data(tmp_path):
    (hostile, after), (_, same) = run_in_group(gather_from_a_hostile_rank, 2, str(tmp_path / "canary"))
    assert not (tmp_path / "canary").exists()
    assert len(hostile) == 44
    assert set(hostile) <= {"JSONDecodeError", "UnicodeDecodeError", "RecursionError"}
    assert after == same == [{"rank": 0}, {"rank": 1}]
