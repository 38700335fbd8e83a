"""A BERT classifier, from a config and with random weights, that finds the missing word in lines of Python's library.

Shows: tokens made by Spark SQL as an array per row, encoded by a vocabulary and padded with a mask by the loader; a
model of transformers in a `ModelSpec`; a naive Bayes baseline by Spark ML on the same rows; `predict` on a DataFrame.

Each row is a line of code or text of Python's standard library, with one keyword replaced by [MASK]. The class is that
keyword. Nothing is downloaded. Needs `pip install transformers`.

Promises: on files that neither model has seen, the accuracy is at least 0.05 higher than that of naive Bayes, which
does not know the order of the tokens. Otherwise, the exit code is 1.

.venv/bin/python examples/text_classification.py
.venv/bin/python examples/text_classification.py --packages all --width 128
.venv/bin/python examples/text_classification.py --master spark://host:7077 --run_dir /shared/runs/bert

On a cluster, all hosts need the same Python at the same path, as Spark reads the files of its library.
"""

import argparse
import functools
import glob
import math
import sys
import sysconfig

import torch
from pyspark.ml import Pipeline
from pyspark.ml.classification import NaiveBayes
from pyspark.ml.feature import CountVectorizer, StringIndexer
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification

import spark_dl

KEYWORDS = ("and", "as", "def", "for", "from", "if", "in", "is", "not", "or", "return", "with")
MAX_TOKENS = 48
PATTERN = r"[A-Za-z_]+|[0-9]+|[^\\sA-Za-z0-9_]"
"""A token: a word, a number, or a single other character."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--packages", default="asyncio,concurrent,email,http,importlib,json,logging,multiprocessing,unittest,xml",
        help='packages of the standard library, or "all" of it (default: %(default)s)',
    )  # fmt: skip
    parser.add_argument("--run_dir", default="runs/text_classification")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="lines of one step, over all ranks (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    return parser.parse_args()


def paths_of(packages: str) -> list[str]:
    """The modules of these packages of the standard library. Spark skips names that begin with "_"."""
    library = sysconfig.get_path("stdlib")
    folders = [library] if packages == "all" else [f"{library}/{name}" for name in packages.split(",")]
    paths = [path for folder in folders for path in glob.glob(f"{folder}/**/*.py", recursive=True)]
    return [path for path in paths if "site-packages" not in path]


def read_lines(spark: SparkSession, paths: list[str]) -> DataFrame:
    """One row per line with a keyword: `file`, `line`, `tokens` with one keyword masked, and this `keyword`."""
    lines = spark.read.text(paths).selectExpr(
        # The last two parts of the path are the same on every machine.
        "regexp_extract(_metadata.file_path, '[^/]+/[^/]+$', 0) AS file",
        "trim(value) AS line",
        f"regexp_extract_all(value, '{PATTERN}', 0) AS words",
    )
    lines = lines.where(f"size(words) BETWEEN 4 AND {MAX_TOKENS}")
    places = lines.selectExpr("*", f"filter(sequence(0, size(words) - 1), i -> words[i] IN {KEYWORDS}) AS places")
    # One of the keywords of the line, the same in every run.
    masked = places.where("size(places) > 0").selectExpr("*", "places[crc32(line) % size(places)] AS place")
    tokens = "transform(words, (word, i) -> if(i = place, '[MASK]', word)) AS tokens"
    return masked.selectExpr("file", "line", "words[place] AS keyword", tokens)


def accuracy(predicted: DataFrame) -> float:
    """The share of the rows whose columns `keyword` and `predicted` are the same."""
    return float(predicted.selectExpr("avg(CAST(keyword = predicted AS DOUBLE)) AS share").first()["share"])


def baselines(train: DataFrame, test: DataFrame) -> tuple[float, float]:
    """The accuracy of the most frequent keyword, and of naive Bayes on the counts of the tokens."""
    indexer = StringIndexer(inputCol="keyword", outputCol="label").fit(train)
    counts = CountVectorizer(inputCol="tokens", outputCol="features", minDF=5)
    model = Pipeline(stages=[indexer, counts, NaiveBayes()]).fit(train)
    most_frequent = test.selectExpr("keyword", f"'{indexer.labels[0]}' AS predicted")
    bayes = model.transform(test).selectExpr("keyword", f"array{tuple(indexer.labels)}[INT(prediction)] AS predicted")
    return accuracy(most_frequent), accuracy(bayes)


def build_model(num_tokens: int, width: int, layers: int) -> nn.Module:
    config = BertConfig(
        vocab_size=num_tokens, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=2 * width, max_position_embeddings=MAX_TOKENS, num_labels=len(KEYWORDS),
        pad_token_id=None,  # 0 is also the code of rare tokens, whose embedding is trained
    )  # fmt: skip
    return BertForTokenClassification(config)


def forward(mask_code: int, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The scores [rows, keywords] of the masked places.

    `tokens` [rows, longest] is padded with 0; `tokens_mask` is true where there is a token.
    """
    scores = model(input_ids=batch["tokens"], attention_mask=batch["tokens_mask"].long()).logits
    places = (batch["tokens"] == mask_code).int().argmax(dim=1)
    return scores[torch.arange(len(places), device=scores.device), places]


def predict(scores: Tensor) -> dict[str, Tensor]:
    return {"code": scores.argmax(dim=1)}


def main() -> None:
    args = parse()
    spark = spark_dl.build_session("text_classification", master=args.master)
    lines = read_lines(spark, paths_of(args.packages)).cache()
    train, test = lines.where("crc32(file) % 5 > 0"), lines.where("crc32(file) % 5 = 0")
    majority, bayes = baselines(train, test)
    print(f"{train.count()} lines to train on, {test.count()} to test; accuracy of naive Bayes {bayes:.3f}")

    data = spark_dl.Data(
        features=("tokens",),
        label="keyword",
        encode={
            "tokens": {"as": "vocabulary", "min_count": 5, "ragged": True},
            "keyword": {"as": "vocabulary", "values": list(KEYWORDS), "unknown": "error"},
        },
    )
    shards = spark_dl.write_shards(train, f"{args.run_dir}/lines", data, overwrite=True)
    (tokens,) = shards.select(["tokens"])
    mask_code = 1 + tokens.encoding.vocabulary.index("[MASK]")  # 0 stands for rare tokens
    spec = spark_dl.ModelSpec(
        build=functools.partial(build_model, tokens.encoding.num_values, args.width, args.layers),
        forward=functools.partial(forward, mask_code),
        predict=predict,
    )
    steps = math.ceil(shards.rows / args.batch) * args.epochs
    config = spark_dl.Config(
        data=data,
        train=spark_dl.Train(
            epochs=args.epochs, global_batch_size=args.batch, optimizer="AdamW", lr=args.lr, warmup_steps=50,
            scheduler="CosineAnnealingLR", scheduler_args={"T_max": steps}, scheduler_interval="step",
        ),
        launch=spark_dl.Launch(num_ranks=args.ranks),
    )  # fmt: skip
    result = spark_dl.train(shards, spec, config, run_dir=f"{args.run_dir}/run", overwrite=True)

    predicted = spark_dl.predict(test, spec, result.checkpoint)
    predicted = predicted.selectExpr("line", "keyword", f"array{KEYWORDS}[code] AS predicted").cache()
    predicted.sample(0.05, seed=0).show(10, truncate=90)
    found = accuracy(predicted)
    is_better = found >= bayes + 0.05
    print(
        f"accuracy {found:.3f}, naive Bayes {bayes:.3f}, most frequent keyword {majority:.3f}: "
        f"{'at least' if is_better else 'NOT'} 0.05 above naive Bayes"
    )
    spark.stop()
    sys.exit(0 if is_better else 1)


if __name__ == "__main__":
    main()
