"""The layer of experts against a plain loop over tokens; its balance, its capacity, and what does not count."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl.nn import FeedForward, MoE
from spark_dl.nn.moe import add_auxiliary_losses, grouped_matmul, note_rows


def build(width=8, num_experts=4, **options):
    torch.manual_seed(0)
    return MoE(width, num_experts, **options)


def tokens(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(layer, x):
    """What the layer computes, token by token and expert by expert, from the definition."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if layer.router.score == "softmax" else logits.sigmoid()
        biased = scores if layer.router.bias is None else scores + layer.router.bias
        chosen = biased.argsort(descending=True)[: layer.router.top_k]
        weights = scores[chosen] / (scores[chosen].sum() if len(chosen) > 1 else 1.0)
        total = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen, strict=True):
            hidden = token @ layer.experts.up[expert]
            if layer.experts.gate is None:
                hidden = layer.experts.activation(hidden)
            else:
                hidden = layer.experts.activation(token @ layer.experts.gate[expert]) * hidden
            total = total + weight * (hidden @ layer.experts.down[expert])
        rows.append(total)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"gated": True, "activation": F.silu, "hidden": 10}], ids=["plain", "gated"])
def test_the_same_as_token_by_token(top_k, score, options):
    """Also the gradients; 10 hidden units are not aligned, so they are multiplied one expert at a time."""
    layer = build(top_k=top_k, score=score, **options)
    layer.router.bias += torch.tensor([0.3, 0.0, -0.2, 0.0])
    again = copy.deepcopy(layer)
    x, x_again = (tokens(3, 5, 8).requires_grad_() for _ in range(2))
    expected, found = one_by_one(again, x_again), layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    target = tokens(3, 5, 8, seed=2)
    for output in (expected, found):
        (output * target).sum().backward()
    torch.testing.assert_close(x.grad, x_again.grad, rtol=1e-5, atol=1e-6)
    for (name, a), b in zip(layer.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=name)
        assert a.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [(8, 16), (5, 7)])
@pytest.mark.parametrize("counts", [[4, 0, 6], [0, 0, 0], [0, 10, 0]])
def test_grouped_matmul_is_a_product_for_each_group(dtype, sizes, counts):
    rows, matrices = tokens(sum(counts), sizes[0]).to(dtype), tokens(3, *sizes).to(dtype)
    rows.requires_grad_()
    matrices.requires_grad_()
    found = grouped_matmul(rows, matrices, torch.tensor(counts))
    expected = torch.cat([part @ matrix for part, matrix in zip(rows.split(counts), matrices, strict=True)])
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out, (rows, matrices), torch.ones_like(out)) for out in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_experts_run_in_the_dtype_of_autocast_and_the_router_does_not():
    layer, x = build(), tokens(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
        assert layer.router(x).weights.dtype == torch.float32
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x), rtol=0.05, atol=0.02)
    assert layer.double()(x.double()).dtype == torch.float64


def test_no_token_at_all():
    x = torch.zeros(0, 8, requires_grad=True)
    layer = build(balance="loss", capacity_factor=1.0)
    output = layer(x)
    assert output.shape == (0, 8)
    (output.sum() + layer.auxiliary_loss).backward()
    assert all(p.grad.eq(0).all() for p in layer.parameters())


def test_the_bias_changes_by_its_rate_toward_the_mean_and_decides_the_choice_alone():
    layer = build(top_k=1, bias_rate=0.25)
    layer.update_bias(torch.tensor([5.0, 1.0, 3.0, 3.0]))
    assert layer.router.bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    layer.router.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    choice = layer.router(tokens(7, 8))
    assert choice.experts.eq(2).all()
    assert choice.weights.max() < 1
    assert not any("bias" in name for name, _ in layer.named_parameters())
    assert "router.bias" in layer.state_dict()


@pytest.mark.parametrize("balance", ["bias", "loss", "none"])
def test_balance(balance):
    """Tokens that nearly all choose the same experts are spread by the bias and by the loss, and not without them."""
    layer = build(num_experts=8, top_k=2, balance=balance, bias_rate=0.005, loss_weight=1.0)
    x = tokens(512, 8) + 2 * tokens(8, seed=9)
    optimizer = torch.optim.SGD([layer.router.weight], lr=0.1)
    for _ in range(100):
        losses = layer(x).square().sum() * 0
        add_auxiliary_losses(layer, losses, lambda: torch.tensor(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.update_bias(layer.take_counts()[:-1])
    layer(x)
    counts = layer.take_counts()[:-1]
    worst = float(counts.max() / counts.mean())
    assert counts.sum() == 1024
    assert worst > 2.5 if balance == "none" else worst < 1.6


def test_the_auxiliary_loss_is_that_of_switch_transformers():
    layer, x = build(top_k=1, balance="loss", loss_weight=0.1), tokens(20, 8)
    layer(x)
    scores = (x @ layer.router.weight.T).softmax(-1)
    share = scores.argmax(-1).bincount(minlength=4) / 20
    assert layer.auxiliary_loss.detach().item() == pytest.approx(0.1 * 4 * (share @ scores.mean(0)).item())
    layer.auxiliary_loss = None
    layer.eval()(x)
    assert layer.auxiliary_loss is None


def test_the_auxiliary_loss_has_a_gradient_and_no_value():
    layer, x, weight = build(balance="loss"), tokens(5, 8), torch.tensor([1.0, 2.0, 0.5, 0.0, 0.0])
    note_rows(layer, weight)
    losses = (layer(x).sum(-1) * weight).sum()
    auxiliary = layer.auxiliary_loss
    (expected,) = torch.autograd.grad((losses + 3 * auxiliary) / 3, layer.router.weight, retain_graph=True)
    found = add_auxiliary_losses(layer, losses, lambda: (weight > 0).sum())
    assert found.item() == losses.item()
    (found / 3).backward()
    torch.testing.assert_close(layer.router.weight.grad, expected)
    assert add_auxiliary_losses(layer, losses, lambda: (weight > 0).sum()) is losses


def force(layer, experts):
    """Makes token i, with the features e_i, choose `experts[i]`, best first."""
    weight = torch.zeros_like(layer.router.weight)
    for token, chosen in enumerate(experts):
        for place, expert in enumerate(chosen):
            weight[expert, token] = 9.0 - place
    layer.router.weight.data = weight


def test_capacity_keeps_first_choices_and_earlier_tokens():
    layer = build(top_k=2, capacity_factor=1.0, balance="none")
    force(layer, [(0, 1), (0, 1), (1, 0), (0, 2), (3, 0), (0, 3), (1, 2), (2, 0)])
    x = torch.eye(8)  # 16 choices of 4 experts: 4 for each
    layer(x)
    assert layer.take_counts().tolist() == [7, 4, 3, 2, 3]
    all_scores = layer.router(x).scores
    kept = {(0, 0), (1, 0), (3, 0), (5, 0), (2, 1), (6, 1), (0, 1), (1, 1), (7, 2), (3, 2), (6, 2), (4, 3), (5, 3)}
    for token, (output, chosen, weights) in enumerate(zip(layer(x), *layer.router(x)[:2], strict=True)):
        expected = torch.zeros(8)
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            if (token, expert) in kept:
                expected += weight * layer.experts(x[token : token + 1], F.one_hot(torch.tensor(expert), 4))[0]
        torch.testing.assert_close(output, expected)
    assert all_scores.shape == (8, 4)
    torch.testing.assert_close(layer.eval()(x), one_by_one(layer, x), rtol=1e-5, atol=1e-6)


def test_rows_of_weight_0_do_not_count_and_take_no_capacity():
    layer = build(top_k=1, capacity_factor=1.0, balance="loss")
    force(layer, [(0,)] * 8)
    x = torch.eye(8).view(4, 2, 8)
    note_rows(layer, torch.tensor([0.0, 0.0, 1.0, 0.5]))
    output = layer(x)
    assert layer.take_counts().tolist() == [4, 0, 0, 0, 3]
    assert output[2, 0].abs().sum() > 0
    assert output[[0, 0, 1, 1, 2, 3, 3], [0, 1, 0, 1, 1, 0, 1]].eq(0).all()
    scores = layer.router(x[2:].reshape(-1, 8)).scores
    assert layer.auxiliary_loss.detach().item() == pytest.approx(0.01 * 4 * scores.mean(0)[0].item())


def test_a_mask_keeps_tokens_out_of_the_layer():
    layer, x = build(), tokens(3, 4, 8)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    output = layer(x, mask)
    assert output[~mask].eq(0).all()
    torch.testing.assert_close(output[mask], layer(x[mask]))
    layer.take_counts()
    note_rows(layer, torch.tensor([0.0, 1.0, 1.0]))
    layer(x, mask)
    assert layer.take_counts().sum() == 2


class Scaled(nn.Module):
    """Experts of a user: each multiplies its tokens by a vector."""

    def __init__(self, num_experts, width):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, num_experts + 1)[:, None].repeat(1, width))

    def forward(self, tokens, counts):
        return tokens * self.scale.repeat_interleave(counts, 0)


def test_experts_of_a_user():
    layer = build(top_k=1, experts=Scaled(4, 8))
    force(layer, [(i % 4,) for i in range(8)])
    x = torch.eye(8)
    weights = layer.router(x).weights
    torch.testing.assert_close(layer(x), x * weights * torch.tensor([1.0, 2, 3, 4] * 2)[:, None])


class WithBuffer(Scaled):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("table", torch.zeros(3))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: MoE(8, 4, top_k=5), r"expected a top_k from 1 to num_experts=4, found 5"),
    (lambda: MoE(8, 4, top_k=0), r"found 0"),
    (lambda: MoE(8, 4, score="relu"), r"expected score 'softmax' or 'sigmoid', found 'relu'"),
    (lambda: MoE(8, 4, balance="luck"), r"expected balance 'bias', 'loss' or 'none', found 'luck'"),
    (lambda: MoE(8, 4, capacity_factor=0), r"expected a capacity_factor above 0, or None, found 0"),
    (lambda: MoE(8, 4, experts=FeedForward(3, 8)), r"num_experts=4, found 'up' with the shape \(3, 8, 32\)"),
    (lambda: MoE(8, 4, experts=WithBuffer(4, 8)), r"without buffers, found 'table'"),
    (lambda: MoE(8, 4, hidden=3, experts=Scaled(4, 8)), r"hidden=3 has no effect"),
    (lambda: build()(torch.zeros(2, 7)), r"expected an input \[..., width=8\], found the shape \(2, 7\)"),
    (lambda: build()(torch.zeros(2, 8), torch.ones(2)), r"mask of bool with the shape \(2,\), found torch.float32"),
])  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_layer_that_was_called_without_gradients_has_no_auxiliary_loss_to_add_and_that_is_an_error():
    layer = build(balance="loss")
    with torch.no_grad():
        layer(tokens(5, 8))
    with pytest.raises(
        ValueError, match=r"MoE\(balance='loss'\): the layer was called without gradients.*use_reentrant"
    ):
        add_auxiliary_losses(layer, torch.zeros((), requires_grad=True), lambda: torch.tensor(1))
    with torch.no_grad():
        layer(tokens(5, 8))
        add_auxiliary_losses(layer, torch.zeros(()), lambda: torch.tensor(1))  # as of a validation
