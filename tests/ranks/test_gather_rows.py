"""A loss that compares the rows of a global batch trains the weights of one process, on any number of ranks."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spark_dl
from spark_dl import ModelSpec, worker
from spark_dl.data.load.build import build_loader, build_train_loader
from spark_dl.evaluate import load_model
from spark_dl.launch.rank.environment import restored_process
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import RankFailed, run_ranks

COLUMNS = {"features": ("image", "text"), "label": None}
SGD = {"optimizer_args": {"momentum": 0.9}, "lr": 0.05}


class TwoTowers(nn.Module):
    """Embeddings of images and of texts. # image: [rows, 6], text: [rows, 4], returns: [rows, 8] each"""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)


def contrastive(images, texts):
    """The loss of CLIP (Radford et al. 2021, arXiv:2103.00020, figure 3): each image with all texts, and back."""
    scores, own = 10 * images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def of_global_batch(model, batch):
    images, texts = (spark_dl.gather_rows(rows, batch) for rows in model(batch["image"], batch["text"]))
    return contrastive(images, texts)


def own_rows_against_all(output, batch):
    """One loss per row, against the texts of all ranks. Rows of weight 0 are no candidates."""
    images, texts = output
    candidates, is_true = spark_dl.gather_rows(texts, batch), batch["weight"] > 0
    before = int((spark_dl.gather_rows(torch.full((len(images),), _rank()), batch) < _rank()).sum())
    own = (before + is_true.cumsum(0) - 1).clamp(0, len(candidates) - 1)
    return F.cross_entropy(10 * images @ candidates.T, own, reduction="none")


def _rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


SPEC = ModelSpec(build=TwoTowers, batch_loss=of_global_batch)


def train_rank(run):
    with restored_process():
        return worker.main(run).result


def dataset(tmp_path, rows):
    rng = np.random.default_rng(3)
    image = rng.standard_normal((rows, 6)).astype(np.float32)
    text = (image[:, :4] + 0.3 * rng.standard_normal((rows, 4))).astype(np.float32)
    return write_dataset(str(tmp_path / "data"), {"image": image, "text": text}, group_rows=40, shard_rows=120)


def evaluate_rank(run):
    with restored_process():
        return worker.main(run, task="evaluate").result


def without_the_batch(model, batch):
    """As a `training_step` of Lightning, whose batch is a tuple of columns."""
    return contrastive(*(spark_dl.gather_rows(rows) for rows in model(batch["image"], batch["text"])))


def trained(tmp_path, data, config, spec=SPEC):
    run = Run(spec=spec, config=config, train=data, run_dir=str(tmp_path / "run"))
    result = run_ranks(train_rank, config.launch.num_ranks, run)[0]
    return result, load_weights(checkpoint.find(run.run_dir))


def plain_loop(data, config, loss):
    """The weights of a loop over the same global batches, in one process."""
    torch.manual_seed(config.train.seed)
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr, momentum=0.9)
    loader = build_loader(data, config, rank=0, world_size=1)
    for epoch in range(config.train.epochs):
        for step in loader.epoch(epoch):
            (batch,) = step.micro_batches
            rows = {key: value[batch["weight"] > 0] for key, value in batch.items()}
            optimizer.zero_grad()
            loss(*model(rows["image"], rows["text"])).backward()
            optimizer.step()
    return model.state_dict()


def mean_loss(model, loader):
    """The mean of the losses of a loader's batches, by their true rows, in one process."""
    total, count = 0.0, 0
    for step in loader.epoch(0):
        (batch,) = step.micro_batches
        rows = {key: value[batch["weight"] > 0] for key, value in batch.items()}
        with torch.no_grad():
            total += float(contrastive(*model(rows["image"], rows["text"]))) * len(rows["weight"])
        count += len(rows["weight"])
    return total / count


def assert_equal(weights, expected):
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [240, 245, 193])  # whole batches, a short last one, and one that not all ranks have
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_weights_are_those_of_the_global_batch(tmp_path, num_ranks, rows):
    data, config = dataset(tmp_path, rows), small_config(num_ranks, SGD, COLUMNS)
    _, weights = trained(tmp_path, data, config)
    assert_equal(weights, plain_loop(data, config, contrastive))


@pytest.mark.parametrize("strategy", [
    (2, {"strategy": "mesh"}), (2, {"strategy": "mesh", "zero_stage": 1}), (2, {"strategy": "mesh", "zero_stage": 3}),
    (1, {"strategy": "single"}),
])  # fmt: skip
def test_the_weights_are_those_of_the_global_batch_in_a_mesh_and_alone(tmp_path, strategy):
    num_ranks, settings = strategy
    data, config = dataset(tmp_path, 245), small_config(num_ranks, SGD, COLUMNS, parallel=parallel(**settings))
    _, weights = trained(tmp_path, data, config)
    assert_equal(weights, plain_loop(data, config, contrastive))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_loss_of_each_row_is_against_the_rows_of_all_ranks(tmp_path, num_ranks):
    def loss(images, texts):
        return F.cross_entropy(10 * images @ texts.T, torch.arange(len(images)))

    data, config = dataset(tmp_path, 245), small_config(num_ranks, SGD, COLUMNS)
    _, weights = trained(tmp_path, data, config, ModelSpec(build=TwoTowers, loss=own_rows_against_all))
    assert_equal(weights, plain_loop(data, config, loss))


def test_the_validation_is_of_the_same_batches_on_any_number_of_ranks(tmp_path):
    losses, data = [], dataset(tmp_path, 245)
    for num_ranks in (1, 2, 3):
        folder = tmp_path / str(num_ranks)
        config = small_config(num_ranks, {**SGD, "validation_fraction": 0.3}, COLUMNS)
        result, _ = trained(folder, data, config)
        losses.append(result["metrics"]["loss"])
        loader = build_loader(data, config, rank=0, world_size=1, split="validation", shuffle=False)
        assert losses[-1] == pytest.approx(mean_loss(load_model(SPEC, result["checkpoint"]), loader), rel=1e-5)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_without_rows_count_none_also_where_the_loss_does_not_pass_its_batch(tmp_path, num_ranks):
    data, spec = dataset(tmp_path, 193), ModelSpec(build=TwoTowers, batch_loss=without_the_batch)
    config = small_config(num_ranks, SGD, COLUMNS)
    result, weights = trained(tmp_path, data, config, spec)
    assert_equal(weights, plain_loop(data, config, contrastive))
    run = Run(spec=spec, config=config, train=data, run_dir=str(tmp_path / "other"), checkpoint=result["checkpoint"])
    found = run_ranks(evaluate_rank, num_ranks, run)[0]
    loader = build_loader(data, config, rank=0, world_size=1, shuffle=False)
    assert found["rows"] == 193
    assert found["loss"] == pytest.approx(mean_loss(load_model(spec, result["checkpoint"]), loader), rel=1e-5)


@pytest.mark.parametrize(("train", "settings", "num_ranks", "message"), [
    ({"accumulation_steps": 2}, {"strategy": "ddp"}, 2, "found train.accumulation_steps=2, expected one micro-batch"),
    ({}, {"strategy": "local_sgd"}, 2, "do not compute a step together; use ddp"),
    ({}, {"strategy": "parameter_server"}, 3, "do not compute a step together; use ddp"),
])  # fmt: skip
def test_where_the_rows_of_all_ranks_are_not_there_it_is_an_error(tmp_path, train, settings, num_ranks, message):
    config = small_config(num_ranks, {**SGD, **train}, COLUMNS, parallel=parallel(**settings))
    with pytest.raises(RankFailed, match=message):
        trained(tmp_path, dataset(tmp_path, 245), config)


def embed(model, batch):
    images, texts = model(batch["image"], batch["text"])
    return {"images": images, "texts": texts, "is_true": batch["weight"] > 0}


def compare(rows):
    assert rows["is_true"].all()
    return contrastive(rows["images"], rows["texts"])


GLOBAL = ModelSpec(build=TwoTowers, embed=embed, global_loss=compare)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rows", [240, 245, 193])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_global_loss_compares_the_rows_of_all_micro_batches(tmp_path, num_ranks, accumulation_steps, rows):
    train = {**SGD, "accumulation_steps": accumulation_steps}
    data, config = dataset(tmp_path, rows), small_config(num_ranks, train, COLUMNS)
    _, weights = trained(tmp_path, data, config, GLOBAL)
    assert_equal(weights, plain_loop(data, small_config(num_ranks, SGD, COLUMNS), contrastive))


@pytest.mark.parametrize("strategy", [
    (2, {"strategy": "mesh"}), (2, {"strategy": "mesh", "zero_stage": 1}), (2, {"strategy": "mesh", "zero_stage": 3}),
    (4, {"strategy": "mesh", "tensor": 2}), (1, {"strategy": "single"}), (2, {"strategy": "horovod"}),
])  # fmt: skip
def test_a_global_loss_under_every_strategy_whose_ranks_step_together(tmp_path, strategy):
    num_ranks, settings = strategy
    if settings["strategy"] == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    data, train = dataset(tmp_path, 245), {**SGD, "accumulation_steps": 2}
    config = small_config(num_ranks, train, COLUMNS, parallel=parallel(**settings))
    _, weights = trained(tmp_path, data, config, GLOBAL)
    assert_equal(weights, plain_loop(data, small_config(1, SGD, COLUMNS), contrastive))


class DropTowers(TwoTowers):
    def __init__(self):
        super().__init__()
        self.text.insert(2, nn.Dropout(0.5))
        self.text.insert(0, nn.BatchNorm1d(4))


def test_a_micro_batch_that_is_embedded_twice_draws_the_same_numbers_and_counts_once(tmp_path):
    """Also where the step is computed by autograd alone, through both micro-batches at once."""
    data, train = dataset(tmp_path, 240), {**SGD, "accumulation_steps": 2, "max_steps": 3}
    config = small_config(1, train, COLUMNS, parallel=parallel("single"))
    _, weights = trained(tmp_path, data, config, dataclasses.replace(GLOBAL, build=DropTowers))
    torch.manual_seed(config.train.seed)
    model = DropTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr, momentum=0.9)
    torch.manual_seed(config.train.seed + 1)
    loader = build_train_loader(data, GLOBAL, config, rank=0, world_size=1)
    for step in itertools.islice(loader.epoch(0), 3):
        optimizer.zero_grad()
        images, texts = zip(*(model(batch["image"], batch["text"]) for batch in step.micro_batches), strict=True)
        contrastive(torch.cat(images), torch.cat(texts)).backward()
        optimizer.step()
    assert_equal(weights, model.state_dict())


class DropByRow(TwoTowers):
    def __init__(self):
        super().__init__()
        self.text.insert(2, nn.Dropout(0.5))


@pytest.mark.parametrize(("num_ranks", "accumulation_steps"), [(1, 2), (2, 1), (2, 2), (3, 4)])
def test_dropout_by_row_draws_the_same_numbers_in_both_passes(tmp_path, num_ranks, accumulation_steps):
    data, spec, found = dataset(tmp_path, 245), dataclasses.replace(GLOBAL, build=DropByRow), []
    for ranks, steps in ((1, 1), (num_ranks, accumulation_steps)):
        train = {**SGD, "accumulation_steps": steps, "random_by": "row"}
        _, weights = trained(tmp_path / f"{ranks}-{steps}", data, small_config(ranks, train, COLUMNS), spec)
        found.append(weights)
    assert_equal(found[1], found[0])


def test_the_loss_and_the_validation_of_a_global_loss_are_those_without_micro_batches(tmp_path):
    data, found = dataset(tmp_path, 245), []
    for steps in (1, 2):
        train = {**SGD, "accumulation_steps": steps, "validation_fraction": 0.3}
        result, _ = trained(tmp_path / str(steps), data, small_config(2, train, COLUMNS), GLOBAL)
        found.append((result["train_loss"], result["metrics"]["loss"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def embed_two_rows(model, batch):
    return model.image(batch["image"])[:2]


def embed_nothing(model, batch):
    return 1.0


def embeddings(rows):
    return rows["images"]


@pytest.mark.parametrize(("spec", "message"), [
    ({"embed": embed_two_rows}, r"spec\.embed: .*each of the \d+ rows, found \(2, 8"),
    ({"embed": embed_nothing}, r"spec\.embed: .*found float"),
    ({"global_loss": embeddings}, r"spec\.global_loss: expected the mean loss .*found \(24, 8\)"),
])  # fmt: skip
def test_B27_rows_and_global_losses_of_another_shape_are_an_error(tmp_path, spec, message):
    config = small_config(2, {**SGD, "accumulation_steps": 2}, COLUMNS)
    with pytest.raises(RankFailed, match=message):
        trained(tmp_path, dataset(tmp_path, 240), config, dataclasses.replace(GLOBAL, **spec))


def test_B27_a_global_loss_and_its_rows_are_given_together():
    with pytest.raises(ValueError, match=r"spec\.embed: expected spec\.global_loss, too"):
        ModelSpec(build=TwoTowers, embed=embed)
    with pytest.raises(ValueError, match=r"spec\.count: has no effect with spec\.global_loss"):
        dataclasses.replace(GLOBAL, count=len)
    with pytest.raises(ValueError, match=r"spec\.batch_loss: has no effect with spec\.global_loss"):
        ModelSpec(build=TwoTowers, embed=embed, global_loss=compare, batch_loss=of_global_batch)
    assert dataclasses.replace(GLOBAL, build=DropTowers).batch_loss == GLOBAL.batch_loss


def gather_of_other_rows(model, batch):
    images, _ = model(batch["image"], batch["text"])
    return spark_dl.gather_rows(images[:3], batch).sum()


def test_a_tensor_of_other_rows_is_an_error(tmp_path):
    spec = ModelSpec(build=TwoTowers, batch_loss=gather_of_other_rows)
    with pytest.raises(RankFailed, match=r"expected one entry for each of the \d+ rows, found shape \(3, 8\)"):
        trained(tmp_path, dataset(tmp_path, 245), small_config(2, SGD, COLUMNS), spec)


def test_one_process_has_its_own_rows():
    rows = torch.arange(6.0).reshape(3, 2)
    assert spark_dl.gather_rows(rows) is rows
    assert spark_dl.gather_rows(rows, {"weight": torch.tensor([1.0, 0.0, 2.0])}).tolist() == [[0, 1], [4, 5]]
    with pytest.raises(ValueError, match="a tensor without axes"):
        spark_dl.gather_rows(torch.tensor(1.0))
