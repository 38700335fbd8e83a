"""A small GPT on the text of Python's standard library: the model and the rows of `conf/train/gpt.yaml`.

`spec.layers` and `spec.tensor_plan`, which say how the model is cut over ranks, are in that file. There is no dropout,
so that every way to cut the model gives the same weights, up to rounding. `conf/train/gpt-experts.yaml` has the same
rows, and a mixture of experts in each block.

spark-dl train --config conf/train/gpt.yaml --master 'local[4]' --run_dir runs/gpt
spark-dl train --config conf/train/gpt-experts.yaml --master 'local[4]' --run_dir runs/gpt-experts
"""

import glob
import sysconfig

import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

import spark_dl

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""The vocabulary: the code of a character is its position. Spark replaces all other characters by "?"."""
CONTEXT = 128
"""Characters that the model reads to predict the next one. A block has one more."""
PACKAGES = "asyncio,email,http,importlib,logging,unittest,urllib,xml"


def paths_of(packages: str) -> list[str]:
    """The modules of packages of the standard library, or of "all" of it. Spark skips names that begin with "_"."""
    library = sysconfig.get_path("stdlib")
    folders = [library] if packages == "all" else [f"{library}/{name}" for name in packages.split(",")]
    paths = [path for folder in folders for path in glob.glob(f"{folder}/**/*.py", recursive=True)]
    return [path for path in paths if "site-packages" not in path]


def read_blocks(spark: SparkSession, paths: list[str]) -> DataFrame:
    """One row per block: its file, its position there, and its characters as codes, an array of CONTEXT + 1 integers.

    The last character of a block is the first one of the next, so that each character is predicted once.
    """
    files = spark.read.text(paths, wholetext=True, recursiveFileLookup=True).selectExpr(
        # The last two parts of the path are the same on every machine.
        "regexp_extract(_metadata.file_path, '[^/]+/[^/]+$', 0) AS file",
        "regexp_replace(value, '[^\\n -~]', '?') AS text",
    )
    starts = f"sequence(1, length(text), {CONTEXT})"
    blocks = files.selectExpr(
        "file", f"posexplode(transform({starts}, i -> substring(text, i, {CONTEXT + 1}))) AS (position, block)"
    )
    codes = "transform(split(block, ''), c -> IF(c = '\\n', 0, ascii(c) - 31)) AS codes"
    return blocks.where(f"length(block) = {CONTEXT + 1}").selectExpr("file", "position", codes)


def read_library(spark: SparkSession) -> DataFrame:
    """The rows of `conf/train/gpt.yaml`. On a cluster, all hosts need the same Python at the same path."""
    return read_blocks(spark, paths_of("asyncio,email,http,logging"))


class Embeddings(nn.Module):
    """Codes [rows, length] -> [rows, length, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.tokens = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(CONTEXT, width)

    def forward(self, codes: Tensor) -> Tensor:
        return self.tokens(codes) + self.positions(torch.arange(codes.shape[1], device=codes.device))


class Attention(nn.Module):
    """Each position attends to itself and to those before it."""

    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is that of this rank: tensor parallelism cuts q, k and v by heads.
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """[rows, length, width] -> the same."""

    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class DenseBlock(Block):
    """A block in which all characters pass through one feed-forward network."""

    def __init__(self, width: int, head_dim: int):
        super().__init__(width, head_dim)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class GPT(nn.Module):
    """Predicts each next character: codes [rows, length] -> scores [rows, length, characters]."""

    def __init__(self, width: int = 64, num_blocks: int = 4, head_dim: int = 16):
        super().__init__()
        self.embed = Embeddings(width)
        self.blocks = nn.ModuleList(DenseBlock(width, head_dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)
        for embedding in (self.embed.tokens, self.embed.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.embed.tokens.weight

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ExpertBlock(Block):
    """A block in which each character passes through 2 of several feed-forward networks."""

    def __init__(self, width: int, head_dim: int, num_experts: int):
        super().__init__(width, head_dim)
        self.experts = spark_dl.nn.MoE(width, num_experts, top_k=2, bias_rate=0.01)  # balance in a short run

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


class ExpertGPT(GPT):
    """The same model with mixtures of experts: more parameters, and about twice the computation per character."""

    def __init__(self, width: int = 64, num_blocks: int = 4, head_dim: int = 16, num_experts: int = 8):
        super().__init__(width, num_blocks=0)
        self.blocks.extend(ExpertBlock(width, head_dim, num_experts) for _ in range(num_blocks))


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["codes"][:, :-1])


def loss(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """One value per character, [rows, CONTEXT]; spark_dl takes the mean over a row's characters."""
    return nn.functional.cross_entropy(scores.transpose(1, 2), batch["codes"][:, 1:].long(), reduction="none")
