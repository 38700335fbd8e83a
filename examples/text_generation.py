"""A character-level transformer on the text of Python's standard library, which ends with text that it generates.

Shows: text files read by Spark, fixed blocks of characters made by Spark SQL, a baseline by Spark SQL on the same rows,
and a model that is loaded on the driver after the training. Rows and model are in `gpt.py`.

Promises: the validation loss is below that of a bigram model, in nats per character, on files that neither model has
seen. Spark counts the bigrams of the training files, and adds one to each count. Otherwise, the exit code is 1.

.venv/bin/python examples/text_generation.py
.venv/bin/python examples/text_generation.py --packages all --epochs 3 --width 256 --layers 4
.venv/bin/python examples/text_generation.py --master spark://host:7077 --text /shared/books --run_dir /shared/runs/text

On a cluster, all hosts need the same Python at the same path, as Spark reads the files of its library; or use --text.
"""

import argparse
import functools
import math
import sys

import torch
from gpt import CHARACTERS, CONTEXT, GPT, PACKAGES, forward, loss, paths_of, read_blocks
from pyspark.sql import DataFrame
from torch import nn

import spark_dl


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--packages", default=PACKAGES,
        help='packages of the standard library, or "all" of it (default: %(default)s)',
    )  # fmt: skip
    parser.add_argument("--text", help="folder or URL of text files to use instead; all executors must reach it")
    parser.add_argument("--run_dir", default="runs/text_generation")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="blocks of one step, over all ranks (default: 32)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--generate", type=int, default=400, help="characters to generate (default: 400)")
    return parser.parse_args()


def bigram_loss(train: DataFrame, validation: DataFrame) -> float:
    """The mean loss of the validation rows, in nats per character, of a bigram model with add-one smoothing."""
    pairs = f"explode(transform(sequence(1, {CONTEXT}), i -> (codes[i - 1] AS a, codes[i] AS b))) AS pair"
    train.selectExpr(pairs).createOrReplaceTempView("train_pairs")
    validation.selectExpr(pairs).createOrReplaceTempView("validation_pairs")
    query = """
        WITH counts AS (SELECT pair.a, pair.b, count(*) AS n FROM train_pairs GROUP BY ALL),
             totals AS (SELECT a, sum(n) AS n FROM counts GROUP BY a),
             held_out AS (SELECT pair.a, pair.b, count(*) AS n FROM validation_pairs GROUP BY ALL)
        SELECT sum(-held_out.n * ln((ifnull(counts.n, 0) + 1) / (ifnull(totals.n, 0) + :num_characters)))
            / sum(held_out.n) AS loss
        FROM held_out LEFT JOIN counts USING (a, b) LEFT JOIN totals USING (a)
    """
    (row,) = train.sparkSession.sql(query, {"num_characters": len(CHARACTERS)}).collect()
    return float(row["loss"])


@torch.no_grad()
def generate(model: nn.Module, prompt: str, length: int, temperature: float = 0.8) -> str:
    generator = torch.Generator().manual_seed(0)
    codes = [CHARACTERS.index(character) for character in prompt]
    for _ in range(length):
        scores = model(torch.tensor([codes[-CONTEXT:]]))[0, -1]
        codes.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    return "".join(CHARACTERS[code] for code in codes)


def main() -> None:
    args = parse()
    spark = spark_dl.build_session("text_generation", master=args.master)
    blocks = read_blocks(spark, [args.text] if args.text else paths_of(args.packages)).cache()
    train, validation = blocks.where("crc32(file) % 10 > 0"), blocks.where("crc32(file) % 10 = 0")
    num_train, num_validation = train.count(), validation.count()
    if not num_train or not num_validation:
        sys.exit(
            f"error: found {num_train} blocks to train on and {num_validation} to validate; expected some of both. One "
            f"file in ten is for the validation, and each needs more than {CONTEXT} characters"
        )
    bigram = bigram_loss(train, validation)
    print(f"{num_train} blocks to train on, {num_validation} to validate; bigram {bigram:.3f} nats per character")

    spec = spark_dl.ModelSpec(build=functools.partial(GPT, args.width, args.layers), forward=forward, loss=loss)
    steps = math.ceil(num_train / args.batch) * args.epochs
    config = spark_dl.Config(
        data=spark_dl.Data(features=("codes",), label=None),
        train=spark_dl.Train(
            epochs=args.epochs,
            global_batch_size=args.batch,
            optimizer="AdamW",
            lr=args.lr,
            scheduler="CosineAnnealingLR",
            scheduler_args={"T_max": steps},
            scheduler_interval="step",
            warmup_steps=min(50, steps // 10),
            clip_grad_norm=1.0,
        ),
        launch=spark_dl.Launch(num_ranks=args.ranks),
    )
    result = spark_dl.train(train, spec, config, validation=validation, run_dir=args.run_dir, overwrite=True)

    print(generate(result.load_model(spec).eval(), "    def ", args.generate))
    found = result.metrics["loss"]
    is_better = found < bigram
    end = "lower than the bigram" if is_better else "NOT lower than the bigram"
    print(f"validation loss {found:.3f}, bigram {bigram:.3f} nats per character: {end}")
    spark.stop()
    sys.exit(0 if is_better else 1)


if __name__ == "__main__":
    main()
