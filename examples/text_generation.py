"""A character-level transformer on the text of Python's standard library, which ends with text that it generates.

Shows: text files read by Spark, fixed blocks made by Spark SQL, a vocabulary of characters, a baseline by Spark SQL on
the same rows, and a model that is loaded on the driver after the training.

Promises: the validation loss is below that of a bigram model, in nats per character, on files that neither model has
seen. Spark counts the bigrams of the training files, and adds one to each count. Otherwise, the exit code is 1.

.venv/bin/python examples/text_generation.py
.venv/bin/python examples/text_generation.py --packages all --epochs 3 --width 256 --layers 4
.venv/bin/python examples/text_generation.py --master spark://host:7077 --text /shared/books --run_dir /shared/runs/text

On a cluster, all hosts need the same Python at the same path, as Spark reads the files of its library; or use --text.
"""

import argparse
import functools
import glob
import math
import sys
import sysconfig

import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

import spark_dl

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""The vocabulary. Spark replaces all other characters by "?"."""
CONTEXT = 128
"""Characters that the model reads to predict the next one. A block has one more."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--packages", default="asyncio,email,http,importlib,logging,unittest,urllib,xml",
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


def paths_of(args: argparse.Namespace) -> list[str]:
    """The text files: those of `--text`, or the modules of the library. Spark skips names that begin with "_"."""
    if args.text:
        return [args.text]
    library = sysconfig.get_path("stdlib")
    folders = [library] if args.packages == "all" else [f"{library}/{name}" for name in args.packages.split(",")]
    paths = [path for folder in folders for path in glob.glob(f"{folder}/**/*.py", recursive=True)]
    return [path for path in paths if "site-packages" not in path]


def read_blocks(spark: SparkSession, paths: list[str]) -> DataFrame:
    """One row per block: its file, and its characters, an array of CONTEXT + 1 strings.

    The last character of a block is the first one of the next, so that each character is predicted once.
    """
    files = spark.read.text(paths, wholetext=True, recursiveFileLookup=True).selectExpr(
        # The last two parts of the path are the same on every machine.
        "regexp_extract(_metadata.file_path, '[^/]+/[^/]+$', 0) AS file",
        "regexp_replace(value, '[^\\n -~]', '?') AS text",
    )
    starts = f"sequence(1, length(text), {CONTEXT})"
    blocks = files.selectExpr("file", f"explode(transform({starts}, i -> substring(text, i, {CONTEXT + 1}))) AS block")
    return blocks.where(f"length(block) = {CONTEXT + 1}").selectExpr("file", "split(block, '') AS characters")


def bigram_loss(train: DataFrame, validation: DataFrame) -> float:
    """The mean loss of the validation rows, in nats per character, of a bigram model with add-one smoothing."""
    pairs = f"explode(transform(sequence(1, {CONTEXT}), i -> (characters[i - 1] AS a, characters[i] AS b))) AS pair"
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


class Transformer(nn.Module):
    """Predicts each next character: codes [rows, length] -> scores [rows, length, characters]."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, nhead=width // 32, dim_feedforward=4 * width, dropout=0.0, activation="gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(CHARACTERS))

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        x = self.embedding(codes) + self.position[:length]
        return self.scores(self.norm(self.blocks(x, mask=mask, is_causal=True)))


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["characters"][:, :-1])


def loss(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """One value per character, [rows, CONTEXT]; spark_dl takes the mean over a row's characters."""
    return nn.functional.cross_entropy(scores.transpose(1, 2), batch["characters"][:, 1:], reduction="none")


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
    blocks = read_blocks(spark, paths_of(args)).cache()
    train, validation = blocks.where("crc32(file) % 10 > 0"), blocks.where("crc32(file) % 10 = 0")
    num_train, num_validation = train.count(), validation.count()
    if not num_train or not num_validation:
        sys.exit(
            f"error: found {num_train} blocks to train on and {num_validation} to validate; expected some of both. One "
            f"file in ten is for the validation, and each needs more than {CONTEXT} characters"
        )
    bigram = bigram_loss(train, validation)
    print(f"{num_train} blocks to train on, {num_validation} to validate; bigram {bigram:.3f} nats per character")

    spec = spark_dl.ModelSpec(build=functools.partial(Transformer, args.width, args.layers), forward=forward, loss=loss)
    steps = math.ceil(num_train / args.batch) * args.epochs
    config = spark_dl.Config(
        data=spark_dl.Data(
            features=("characters",),
            label=None,
            encode={"characters": {"as": "vocabulary", "values": list(CHARACTERS), "unknown": "error"}},
        ),
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
