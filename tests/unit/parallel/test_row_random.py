"""Random numbers that depend on the row, and not on which rows are beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from spark_dl.data.columns.batch import StreamRows
from spark_dl.parallel.row_random import check_rows_are_first, random_by_row
from spark_dl.spec import NumberedBatch

BATCH = NumberedBatch({"weight": torch.ones(8)}, (1, 5), [StreamRows(0, 2, 0, 3), StreamRows(1, 0, 4, 5)])
ROWS = BATCH.row_numbers()


def drawn(function, rows=ROWS, seed=3, batch=BATCH):
    with random_by_row(batch, rows, seed):
        return function(len(rows))


DRAWS = {
    "dropout": lambda n: F.dropout(torch.ones(n, 6, 5)),
    "dropout of bf16": lambda n: F.dropout(torch.ones(n, 6, 5, dtype=torch.bfloat16), 0.3),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n, 6), training=True),
    "dropout of channels": lambda n: F.dropout2d(torch.ones(n, 6, 5, 5)),
    "rand": lambda n: torch.rand(n, 6),
    "rand in float64": lambda n: torch.rand(n, 6, dtype=torch.float64),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 6)),
    "randn": lambda n: torch.randn(n, 6),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, 6)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 6), 0.4)),
    "uniform_": lambda n: torch.empty(n, 6).uniform_(2, 5),
    "normal_": lambda n: torch.empty(n, 6).normal_(2, 5),
    "gumbel": lambda n: F.gumbel_softmax(torch.zeros(n, 6)),
    "randint": lambda n: torch.randint(3, 9, (n, 6)),
    "rows of one axis": lambda n: torch.rand(n),
    "several calls": lambda n: torch.cat([torch.rand(n, 2), torch.rand(n, 2)], 1),
    "rows and channels in one axis": lambda n: F.dropout(torch.ones(n * 4, 5)).view(n, 4, 5),
    "attention": lambda n: F.scaled_dot_product_attention(*[torch.ones(n, 2, 3, 4)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_row_draws_the_same_numbers_whatever_rows_are_beside_it(name):
    whole = drawn(DRAWS[name])
    assert whole.float().unique(dim=0).shape[0] > 1
    for rows in (slice(0, 3), slice(3, 8), slice(5, 7)):
        assert drawn(DRAWS[name], ROWS[rows]).equal(whole[rows])


def test_padding_changes_no_number():
    longer = drawn(lambda n: torch.rand(n, 9, 7))
    assert drawn(lambda n: torch.rand(n, 6, 5)).equal(longer[:, :6, :5])


def test_other_steps_seeds_and_calls_draw_other_numbers():
    def rand(n):
        return torch.rand(n, 1000)

    later = NumberedBatch(dict(BATCH), (1, 6), [])
    found = [drawn(rand), drawn(rand, seed=4), drawn(rand, batch=later), drawn(lambda n: (rand(n), rand(n))[1])]
    stacked = torch.stack([each.flatten() for each in found])
    assert (torch.corrcoef(stacked) - torch.eye(4)).abs().max() < 0.05
    rows = drawn(rand)
    assert (torch.corrcoef(rows) - torch.eye(8)).abs().max() < 0.15


def test_the_numbers_have_their_distributions():
    rows = torch.arange(500)
    uniform = drawn(lambda n: torch.rand(n, 400), rows)
    counts = torch.histc(uniform, 100, 0, 1)
    assert ((counts - 2000).square() / 2000).sum() < 160  # chi-squared, 99 degrees of freedom: p = 1e-4
    normal = drawn(lambda n: torch.randn(n, 400), rows)
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs((normal.abs() < 1).float().mean() - 0.6827) < 0.005
    kept = drawn(lambda n: F.dropout(torch.ones(n, 400), 0.3), rows)
    assert abs((kept > 0).float().mean() - 0.7) < 0.005
    assert abs(kept.mean() - 1) < 0.01
    integers = drawn(lambda n: torch.randint(0, 7, (n, 400)), rows)
    assert torch.bincount(integers.flatten()).tolist() == pytest.approx([200_000 / 7] * 7, rel=0.03)
    exponential = drawn(lambda n: torch.empty(n, 400).exponential_(2.0), rows)
    assert abs(exponential.mean() - 0.5) < 0.01


def test_a_checkpointed_layer_draws_the_same_numbers_again():
    inputs = torch.ones(8, 50, requires_grad=True)
    with random_by_row(BATCH, ROWS, 3):
        output = checkpoint(lambda x: F.dropout(x) * F.dropout(x), inputs, use_reentrant=False)
        output.sum().backward()
    assert inputs.grad.equal(2 * output.detach())


def test_one_number_for_all_rows_is_the_same_on_all_ranks():
    assert drawn(lambda n: torch.rand(()), ROWS[:3]).equal(drawn(lambda n: torch.rand(()), ROWS[3:]))


def test_a_generator_of_the_model_draws_what_it_would():
    def own(n):
        return torch.rand(2, 3, generator=torch.Generator().manual_seed(1))

    assert drawn(own).equal(own(8))


@pytest.mark.parametrize(("function", "message"), [
    (lambda n: torch.rand(13, 5), r"rand.*the shape \(13, 5\), expected the 8 rows of the batch as the first axis"),
    (lambda n: torch.randperm(n), r"randperm.*are not known to be by row"),
    (lambda n: torch.multinomial(torch.ones(n, 4), 2), r"multinomial.*are not known to be by row"),
])  # fmt: skip
def test_B27_numbers_that_are_not_by_row_are_an_error(function, message):
    with pytest.raises(ValueError, match=rf"train\.random_by: .*{message}.*set it to 'rank'"):
        drawn(function)


@pytest.mark.parametrize(("layer", "change"), [
    (nn.LSTM(2, 2, num_layers=2, dropout=0.1), "nn.LSTM of one layer"),
    (nn.TransformerEncoderLayer(2, 1), "batch_first=True"),
])  # fmt: skip
def test_B27_layers_that_draw_numbers_of_positions_are_an_error(layer, change):
    with pytest.raises(ValueError, match=rf"train\.random_by: the layer '1.*use {change}"):
        check_rows_are_first(nn.Sequential(nn.Linear(2, 2), layer))
    check_rows_are_first(nn.Sequential(nn.LSTM(2, 2, dropout=0), nn.TransformerEncoderLayer(2, 1, batch_first=True)))


def test_B27_rows_whose_streams_are_not_known_are_an_error():
    with pytest.raises(ValueError, match=r"train\.random_by: it is not known which of the 8 rows"):
        NumberedBatch({"weight": torch.ones(8)}, (0, 0), []).row_numbers()
