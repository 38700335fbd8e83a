"""Measures rows per second of training and scoring a small text model, on rows of 5 to 256 tokens, beside peers.

The lengths are log-normal, as those of texts are: half of them have at most 40 tokens. The model is a BERT with random
weights. All ways have the same rows, threads and cores, and take turns. Rates are medians over all rows of an epoch, or
of the table, after a warm-up.

Training, in one process: spark_dl as it is, with `group_by_length`, with `max_tokens`, and with both; the Trainer of
transformers as it is, and with its own grouping.

Scoring, of one DataFrame in one session: `spark_dl.predict`; a pandas UDF that pads each batch, one that sorts its rows
by length, `predict_batch_udf`, and `SentenceTransformer.encode` in this process, if it is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from spark_dl.config import Checkpoint, Config, Data, Launch, Loader, Train
from spark_dl.data.columns.ragged import Ragged, from_lengths
from spark_dl.data.write.arrays import write_arrays
from spark_dl.driver import train
from spark_dl.parallel.single import Single
from spark_dl.predict import predict
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_VOCABULARY, _HIDDEN, _LAYERS, _SHORTEST, _LONGEST, _MEDIAN = 8000, 128, 4, 5, 256, 40
_TRAIN_ROWS, _SCORE_ROWS, _BATCH, _UDF_BATCH = 1920, 8000, 32, 64
_MAX_TOKENS = 1024
_TOLERANCE = 1e-4
"""Difference of predictions: other padding gives other sums."""


def measure(spark: SparkSession, *, repeats: int = 3, scale: float = 1.0) -> dict[str, Any]:
    """Measures median rows per second of each way, and ratios of medians. Called on the driver.

    Raises RuntimeError if two ways predict different values for a row.
    """
    with tempfile.TemporaryDirectory() as folder:
        training = _train(spark, folder, repeats, max(8 * _BATCH, round(_TRAIN_ROWS * scale)))
        scoring = _score(spark, folder, repeats, max(64, round(_SCORE_ROWS * scale)))
    _print("training", training, "spark_dl")
    _print("scoring", scoring, "predict_batch_udf")
    best = max(rate for name, rate in scoring.items() if name != "spark_dl")
    return {
        "training": training, "scoring": scoring,
        "training_to_padded": training["spark_dl, both"] / training["spark_dl"],
        "training_to_grouped_trainer": training["spark_dl, both"] / training["transformers, grouped"],
        "scoring_to_best_peer": scoring["spark_dl"] / best,
        "repeats": repeats,
    }  # fmt: skip


def texts(rows: int, seed: int = 0) -> Ragged:
    """Returns rows of token numbers, of log-normal lengths. # (rows, 5 to 256) int64"""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(np.log(_MEDIAN), 0.8, rows)).round().clip(_SHORTEST, _LONGEST).astype(np.int64)
    return from_lengths(random.integers(1, _VOCABULARY, int(lengths.sum())), lengths)


def build() -> nn.Module:
    """Returns a BERT with a classifier of two classes, without dropout, so that all ways compute the same."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model: nn.Module = BertForSequenceClassification(
        BertConfig(
            vocab_size=_VOCABULARY, hidden_size=_HIDDEN, num_hidden_layers=_LAYERS, num_attention_heads=4,
            intermediate_size=4 * _HIDDEN, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
        )
    )  # fmt: skip
    return model


def _forward(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["tokens"], attention_mask=batch["tokens_mask"].long()).logits
    return logits


_SPEC = ModelSpec(build=build, forward=_forward, predict=lambda logits: {"prediction": logits[:, 0]})


# Training


def _train(spark: SparkSession, folder: str, repeats: int, rows: int) -> dict[str, float]:
    """Trains an epoch in each way, in turn: in a process of Spark, and the Trainer in this one."""
    threads = spark.sparkContext.defaultParallelism
    torch.set_num_threads(threads)
    tokens, labels = texts(rows), np.random.default_rng(1).integers(0, 2, rows)
    write_arrays(
        {"tokens": tokens, "label": labels}, f"{folder}/train",
        Data(features=("tokens",), label="label", encode={"tokens": {"ragged": True}}),
    )  # fmt: skip
    grouped, cut = {"group_by_length": True}, {"max_tokens": _MAX_TOKENS}
    ways: dict[str, Callable[[], float]] = {
        "spark_dl": functools.partial(_train_ours, spark, folder, threads, {}),
        "spark_dl, group_by_length": functools.partial(_train_ours, spark, folder, threads, grouped),
        "spark_dl, max_tokens": functools.partial(_train_ours, spark, folder, threads, cut),
        "spark_dl, both": functools.partial(_train_ours, spark, folder, threads, {**grouped, **cut}),
        "transformers": functools.partial(_train_theirs, folder, tokens, labels, "random"),
        "transformers, grouped": functools.partial(_train_theirs, folder, tokens, labels, "group_by_length"),
    }
    return _medians(ways, repeats)


def _train_ours(spark: SparkSession, folder: str, threads: int, settings: dict[str, Any]) -> float:
    """Returns rows per second of the steps of an epoch."""
    config = Config(
        data=Data(features=("tokens",), label="label"),
        train=Train(global_batch_size=_BATCH, optimizer="AdamW", lr=1e-4, log_every=1),
        loader=Loader(num_streams=8, **settings),
        parallel=Single(),
        launch=Launch(num_ranks=1, threads=threads),
        checkpoint=Checkpoint(keep=1),
    )
    with tempfile.TemporaryDirectory() as run_dir:
        result = train(f"{folder}/train", _SPEC, config, run_dir=run_dir, spark=spark, progress=False)
        seconds = sum(line["seconds"] for line in read_metrics(run_dir) if line["kind"] == "step")
    return float(result.rows / seconds)


def _train_theirs(folder: str, tokens: Ragged, labels: np.ndarray[Any, Any], sampling: str) -> float:
    """Returns rows per second of an epoch of the Trainer."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": int(label)} for row, label in zip(_lists(tokens), labels, strict=True)]
    trainer = Trainer(
        model=build(), train_dataset=rows, data_collator=_padded,
        args=TrainingArguments(
            output_dir=f"{folder}/trainer", per_device_train_batch_size=_BATCH, num_train_epochs=1, learning_rate=1e-4,
            save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True,
            train_sampling_strategy=sampling, remove_unused_columns=False,
        ),
    )  # fmt: skip
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return len(rows) / (time.perf_counter() - start)


def _lists(tokens: Ragged) -> list[list[int]]:
    return [tokens.values[start:stop].tolist() for start, stop in itertools.pairwise(tokens.offsets.tolist())]


def _padded(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = (tokens > 0).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


# Scoring


def _score(spark: SparkSession, folder: str, repeats: int, rows: int) -> dict[str, float]:
    tokens = texts(rows, seed=2)
    of_rows = _lists(tokens)
    spark.createDataFrame(list(enumerate(of_rows)), "row long, tokens array<long>").repartition(
        2 * spark.sparkContext.defaultParallelism
    ).write.parquet(f"{folder}/scored")
    df = spark.read.parquet(f"{folder}/scored")
    weights = {name: tensor.numpy() for name, tensor in build().state_dict().items()}
    config = Config(data=Data(features=("tokens",), label=None, encode={"tokens": {"ragged": True}}))
    tables: dict[str, DataFrame] = {
        "spark_dl": predict(df, _SPEC, config=config),
        "pandas_udf": df.withColumn("prediction", _pandas_udf(weights, sorts=False)("tokens")),
        "pandas_udf, sorted": df.withColumn("prediction", _pandas_udf(weights, sorts=True)("tokens")),
        "predict_batch_udf": df.withColumn("prediction", _batch_udf(weights)(_at_full_length("tokens"))),
    }
    _check_same(tables)
    ways: dict[str, Callable[[], float]] = {
        name: functools.partial(_rate, functools.partial(_discard, table), rows) for name, table in tables.items()
    }
    if importlib.util.find_spec("sentence_transformers") is not None:
        encode = _sentence_transformer(folder, [" ".join(f"w{n}" for n in each) for each in of_rows])
        ways["SentenceTransformer.encode"] = functools.partial(_rate, encode, rows)
    else:
        print("SentenceTransformer.encode: not measured; pip install sentence-transformers", file=sys.stderr)
    return _medians(ways, repeats)


def _loaded(weights: dict[str, np.ndarray[Any, Any]]) -> nn.Module:
    model = build()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    torch.set_num_threads(1)  # each thread is one task
    return model.eval()


def _scores(model: nn.Module, rows: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Returns the predictions of some rows of tokens, padded to the longest. # (rows,)"""
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        scores: np.ndarray[Any, Any] = model(tokens, attention_mask=(tokens > 0).long()).logits[:, 0].numpy()
    return scores


def _pandas_udf(weights: dict[str, np.ndarray[Any, Any]], *, sorts: bool) -> Any:
    """Returns the function that a user writes by hand. sorts: whether it sorts the rows of a batch by length."""
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    from pyspark.sql import functions

    def score(batches: Any) -> Any:
        model = _loaded(weights)
        for batch in batches:
            order = np.argsort([len(row) for row in batch]) if sorts else np.arange(len(batch))
            scores = np.empty(len(batch), dtype=np.float32)
            for start in range(0, len(order), _UDF_BATCH):
                chosen = order[start : start + _UDF_BATCH]
                scores[chosen] = _scores(model, [batch.iloc[i] for i in chosen])
            yield pd.Series(scores)

    hints = Iterator[pd.Series]
    score.__annotations__ = {"batches": hints, "return": hints}
    return functions.pandas_udf(score, "float")


def _batch_udf(weights: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Returns Spark's own function for predictions, which takes rows of one length only."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import FloatType

    def make_predict_fn() -> Callable[[Any], Any]:
        model = _loaded(weights)

        def predict_batch(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            rows = torch.from_numpy(tokens.astype(np.int64))
            with torch.inference_mode():
                found: np.ndarray[Any, Any] = model(rows, attention_mask=(rows > 0).long()).logits[:, 0].numpy()
            return found

        return predict_batch

    return predict_batch_udf(
        make_predict_fn, return_type=FloatType(), batch_size=_UDF_BATCH, input_tensor_shapes=[[_LONGEST]]
    )


def _at_full_length(name: str) -> Any:
    from pyspark.sql import functions as F  # as Spark's documentation has it

    zeros = F.array_repeat(F.lit(0).cast("long"), F.lit(_LONGEST) - F.size(name))
    return F.concat(name, zeros)


def _sentence_transformer(folder: str, sentences: Sequence[str]) -> Callable[[], object]:
    """Returns the encoder of the same BERT, of texts whose words are its tokens, which it sorts by length itself."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found,unused-ignore]
    from sentence_transformers.models import Pooling, Transformer  # type: ignore[import-not-found,unused-ignore]
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, "[UNK]": _VOCABULARY, **{f"w{n}": n for n in range(1, _VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = f"{folder}/sentences"
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    build().bert.save_pretrained(path)  # type: ignore[union-attr,operator]
    transformer = Transformer(path, max_seq_length=_LONGEST)
    encoder = SentenceTransformer(modules=[transformer, Pooling(_HIDDEN)], device="cpu")
    return functools.partial(encoder.encode, list(sentences), batch_size=_UDF_BATCH, show_progress_bar=False)


def _check_same(tables: dict[str, DataFrame]) -> None:
    found = {name: {r["row"]: r["prediction"] for r in df.limit(64).collect()} for name, df in tables.items()}
    expected = found["pandas_udf"]
    for name, rows in found.items():
        common = expected.keys() & rows.keys()
        worst = max((abs(rows[row] - expected[row]) for row in common), default=0.0)
        if not common or worst > _TOLERANCE:
            raise RuntimeError(
                f"{name}: predictions of {len(common)} rows differ from those of pandas_udf by {worst:g}"
            )


def _discard(df: DataFrame) -> None:
    df.select("row", "prediction").write.format("noop").mode("overwrite").save()


def _rate(work: Callable[[], object], rows: int) -> float:
    start = time.perf_counter()
    work()
    return rows / (time.perf_counter() - start)


def _medians(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Runs the ways in turn, the first time to warm up, and returns their median rates."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):
        for name, run in ways.items():
            rate = run()
            if i:
                rates[name].append(rate)
    return {name: statistics.median(values) for name, values in rates.items()}


def _print(what: str, rates: dict[str, float], base: str) -> None:
    for name, rate in rates.items():
        print(f"{what:9} {name:28} {rate:10,.1f} rows/s {rate / rates[base]:6.2f}x", file=sys.stderr)
