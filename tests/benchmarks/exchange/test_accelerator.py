"""The simulated accelerator: sizes, order, time and randomness of its gradients."""

import time
import zlib
from collections import Counter

import pytest
import torch
from torch import nn

from benchmarks.exchange.accelerator import accelerator_spec, build_accelerator
from benchmarks.model.profiles import PROFILES, bert, resnet50
from spark_dl.parallel.loss import weighted_loss_sum
from tests.builders.models import small_config


def step(model, rows=4, seed=0):
    """One step on random rows; returns the times and copies of the gradients."""
    model.zero_grad(set_to_none=True)
    model(torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))).sum().backward()
    return model.steps[-1], [p.grad.clone() for p in model.parameters()]


def quick(**arguments):
    return build_accelerator(resnet50(), **{"forward_s": 0.0, "backward_s": 0.0, "scale": 0.01, **arguments})


@pytest.mark.parametrize(("name", "tensors", "parameters", "multiply_adds"), [
    ("resnet50", 161, 25_557_032, 4_089_184_256),  # torchvision's documentation: 25557032 and 4.09 GFLOPS
    ("bert_base", 199, 109_482_240, 12 * 128 * (12 * 768**2 + 2 * 128 * 768) + 768**2),
    ("bert_large", 391, 335_141_888, 24 * 128 * (12 * 1024**2 + 2 * 128 * 1024) + 1024**2),
])  # fmt: skip
def test_profiles_have_the_networks_sizes(name, tensors, parameters, multiply_adds):
    profile = PROFILES[name]()
    assert profile.name == name
    assert (len(profile.layers), profile.num_parameters) == (tensors, parameters)
    assert profile.gradient_bytes == 4 * parameters
    assert profile.multiply_adds == multiply_adds
    assert sum(layer.share for layer in profile.layers) == pytest.approx(1)
    assert len({layer.name for layer in profile.layers}) == tensors


def test_resnet50_s_shapes():
    layers = {layer.name: layer for layer in resnet50().layers}
    kinds = Counter(len(layer.shape) for layer in layers.values())
    assert kinds == {4: 53, 1: 2 * 53 + 1, 2: 1}  # convolutions, their norms and the bias, the linear layer
    assert layers["conv1.weight"].shape == (64, 3, 7, 7)
    assert layers["layer2.0.conv2.weight"].shape == (128, 128, 3, 3)
    assert layers["layer4.0.downsample.0.weight"].shape == (2048, 1024, 1, 1)
    assert layers["fc.weight"].shape == (1000, 2048)
    assert layers["conv1.weight"].share == pytest.approx(64 * 3 * 49 * 112**2 / 4_089_184_256)
    assert [next(iter(layers)), list(layers)[-1]] == ["conv1.weight", "fc.bias"]


def encoder_of_torch(hidden):
    """An encoder layer of torch's own, which has the tensors of BERT's, with the three projections in one."""
    return nn.TransformerEncoderLayer(hidden, nhead=12, dim_feedforward=4 * hidden)


def test_an_encoder_layer_has_as_many_parameters_as_torch_s_own():
    layers = [layer for layer in bert("bert", hidden=768, num_layers=1).layers if layer.name.startswith("encoder")]
    assert len(layers) == 16
    assert sum(layer.num_parameters for layer in layers) == sum(p.numel() for p in encoder_of_torch(768).parameters())


def test_longer_sequences_give_attention_a_larger_share():
    def share(length):
        profile = bert("bert", hidden=768, num_layers=2, sequence_length=length)
        return sum(layer.share for layer in profile.layers if layer.name.endswith("value.weight"))

    per_token = 12 * 768**2  # of the weights, of which the values' are a twelfth
    for length in (128, 512):
        attention = 2 * length * 768
        assert share(length) == pytest.approx((per_token / 12 + attention) / (per_token + attention), rel=1e-2)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("fraction", [1.0, 0.1, 0.01])
def test_a_shrunk_profile_keeps_shares_and_axes(name, fraction):
    profile = PROFILES[name]()
    shrunk = profile.shrunk(fraction)
    assert shrunk.num_parameters == pytest.approx(profile.num_parameters * fraction, rel=0.03)
    for layer, before in zip(shrunk.layers, profile.layers, strict=True):
        assert (layer.share, layer.shape[1:]) == (before.share, before.shape[1:])
        assert 1 <= layer.shape[0] <= before.shape[0]


def test_ready_times_grow_to_the_end_of_backward():
    profile = resnet50()
    ready = profile.ready_s(2.0)
    assert len(ready) == 161
    assert ready == sorted(ready)
    assert ready[0] == 0  # the bias of the last layer
    assert ready[-1] == pytest.approx(2.0)
    assert [layer.name for layer in profile.backward_layers()][:2] == ["fc.bias", "fc.weight"]


def test_gradients_have_the_layers_shapes_and_come_backwards():
    model = quick()
    arrived = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    times, gradients = step(model)
    names = [layer.name.replace(".", "_") for layer in model.profile.layers]
    assert arrived == names[::-1]
    assert [tuple(g.shape) for g in gradients] == [layer.shape for layer in model.profile.layers]
    assert len(times.ready) == len(names)
    moments = [times.forward_start, times.forward_end, times.backward_start, *times.ready]
    assert moments == sorted(moments)
    assert times.backward_end == times.ready[-1]


def test_a_gradient_is_there_before_the_next_layer_begins():
    """Else DDP could not send it while backward goes on."""
    model = quick(backward_s=0.2)
    arrived = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: arrived.append(time.perf_counter()))
    times, _ = step(model)
    assert all(seen <= next_ready for seen, next_ready in zip(arrived, times.ready[1:], strict=False))
    expected = model.profile.ready_s(0.2)
    # never early, but for what is slept with the layers after it
    assert all(r - times.backward_start >= e - 1.1e-3 for r, e in zip(times.ready, expected, strict=True))


def test_a_step_takes_its_time_asleep():
    model = quick(forward_s=0.2, backward_s=0.4)
    step(model)
    cpu = time.process_time()
    times, _ = step(model)
    cpu = time.process_time() - cpu
    assert times.forward_end - times.forward_start >= 0.2
    assert times.backward_end - times.backward_start >= 0.4
    assert cpu < 0.3


def test_gradients_are_random_and_new_in_every_step_for_every_seed_and_rows():
    def gradients_of(model, seed=0):
        return torch.cat([g.flatten() for g in step(model, seed=seed)[1]])

    model = quick()
    first, second = gradients_of(model), gradients_of(model)
    others = [second, gradients_of(quick(seed=1)), gradients_of(quick(), seed=1)]
    assert torch.equal(first, gradients_of(quick()))
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.05
    assert first.mean().abs() < 1e-4
    assert first.std() == pytest.approx(1e-3, rel=0.05)
    raw = first.numpy().tobytes()
    assert len(zlib.compress(raw)) > 0.9 * len(raw)


def test_gradients_accumulate_and_belong_to_who_has_them():
    model, alone = quick(), quick()
    _, first = step(alone)
    _, second = step(alone)
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model(rows).sum().backward()
    for parameter, a, b in zip(model.parameters(), first, second, strict=True):
        torch.testing.assert_close(parameter.grad, a + b)
        parameter.grad.zero_()
    _, third = step(model)
    _, expected = step(alone)
    assert all(torch.equal(a, b) for a, b in zip(third, expected, strict=True))


def test_no_backward_pass_leaves_no_times():
    model = quick()
    with torch.no_grad():
        assert model(torch.zeros(5, 2)).tolist() == [0] * 5
    assert not model.steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("rows", [0, 1, 100])
def test_any_column_will_do(dtype, rows):
    model = quick()
    losses = model(torch.ones(rows, 2, 3).to(dtype), torch.ones(rows))
    assert losses.shape == (rows,)
    losses.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_have_the_type_of_the_parameters():
    model = quick().to(torch.float64)
    _, gradients = step(model)
    assert {g.dtype for g in gradients} == {torch.float64}


@pytest.mark.parametrize("label", ["label", None])
def test_the_spec_trains_with_and_without_a_label(label):
    spec = accelerator_spec(resnet50(), forward_s=0.0, backward_s=0.0, scale=0.01)
    config = small_config(1, data={"features": ("x",), "label": label})
    batch = {"x": torch.randn(6, 4), "label": torch.zeros(6), "weight": torch.ones(6)}
    model = spec.build()
    output, loss = weighted_loss_sum(spec, model, batch, config)
    assert output.shape == (6,)
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(("arguments", "message"), [
    ({"forward_s": -1.0}, "forward_s: .*found -1"), ({"backward_s": float("nan")}, "backward_s: .*found nan"),
    ({"scale": 0}, "scale: .*found 0"), ({"scale": 1.5}, "scale: .*found 1.5"),
])  # fmt: skip
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        quick(**arguments)
