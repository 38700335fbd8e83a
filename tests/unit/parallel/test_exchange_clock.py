"""What counts as being blocked in an exchange."""

import time

import torch
from torch import nn

from spark_dl.parallel.exchange_clock import ExchangeClock, build_clock
from spark_dl.world import World


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.3)
        return grad


def backward(clock, *, exchange_s):
    """A backward pass as DDP's: the last gradient starts a wait at the end of the pass."""
    weight = nn.Parameter(torch.ones(3))

    def wait(parameter):
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: time.sleep(exchange_s))

    weight.register_post_accumulate_grad_hook(wait)
    loss = SlowGradient.apply(weight).sum()
    clock.watch_backward(loss)
    loss.backward()
    clock.end_backward()


def test_the_wait_after_the_last_gradient_counts_and_the_gradients_do_not():
    clock = ExchangeClock()
    backward(clock, exchange_s=0.05)
    data_s, blocked_s = clock.take_step()
    assert data_s == 0
    assert 0.05 <= blocked_s < 0.3
    assert clock.take_step() == (0.0, 0.0)
    backward(clock, exchange_s=0.0)
    assert clock.take_step()[1] < 0.3


def test_a_block_counts_also_if_it_raises():
    clock = ExchangeClock()
    try:
        with clock:
            time.sleep(0.02)
            raise RuntimeError
    except RuntimeError:
        pass
    assert 0.02 <= clock.take_step()[1] < 1


class Wrapper(nn.Module):
    """Sends buffers before the model, as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        time.sleep(0.05)
        return self.module(x)


def test_buffers_count_where_there_are_any_and_only_if_they_are_sent():
    for model, is_counted in ((nn.BatchNorm1d(2), True), (nn.Linear(2, 2), False)):
        clock = ExchangeClock()
        clock.watch_buffers(wrapped := Wrapper(model))
        model(torch.ones(3, 2))
        assert clock.take_step() == (0.0, 0.0)
        wrapped(torch.ones(3, 2))
        assert (clock.take_step()[1] >= 0.05) == is_counted


def test_on_a_gpu_the_host_s_times_say_nothing():
    world = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "host": "here", "store": None}
    assert build_clock(World(device=torch.device("cuda", 0), **world)) is None
    assert isinstance(build_clock(World(device=torch.device("cpu"), **world)), ExchangeClock)
