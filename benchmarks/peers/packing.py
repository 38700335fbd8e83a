"""Measures true tokens per second of training a small causal language model on texts of 20 to 200 tokens, beside TRL.

The lengths are log-normal, as those of texts are: half of them have at most 40 tokens. The model is a GPT-2 with random
weights, and the texts are a Markov chain, so that there is something to learn. A step has about as many true tokens in
each way. Rates are medians over all steps of an epoch, after a warm-up; the loss is that of other texts after it, which
are never packed.

In one process each: spark_dl with padded texts, sorted by length with `max_tokens`, and with packs of `pack_rows`; the
SFTTrainer of TRL with padded texts and with its packs, if it is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from spark_dl.config import Checkpoint, Config, Data, Launch, Loader, Train
from spark_dl.data.write.shards import write_shards
from spark_dl.data.write.tokens import pack_rows
from spark_dl.driver import train
from spark_dl.nn import causal_lm_loss
from spark_dl.parallel.single import Single
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_VOCABULARY, _HIDDEN, _LAYERS, _SHORTEST, _LONGEST, _MEDIAN = 2000, 256, 4, 20, 200, 40
_TEXTS, _VALIDATION, _BATCH, _PACK = 1600, 200, 32, 512
_LR = 1e-3
_COLUMNS = {"padded": ("input_ids",), "packs": ("input_ids", "labels", "position_ids")}

Texts = list[list[int]]
Result = tuple[float, float]
"""True tokens per second of the steps, and the loss of the validation texts."""


def measure(spark: SparkSession, *, repeats: int = 3, scale: float = 1.0) -> dict[str, Any]:
    """Measures median tokens per second of each way, and ratios of medians. Called on the driver."""
    threads = spark.sparkContext.defaultParallelism
    torch.set_num_threads(threads)
    given, held_out = texts(max(4 * _BATCH, round(_TEXTS * scale)), 0), texts(_VALIDATION, 1)
    per_step = _BATCH * sum(map(len, given)) / len(given)
    with tempfile.TemporaryDirectory() as folder:
        df = spark.createDataFrame([(text,) for text in given], "input_ids array<int>")
        packs = pack_rows(df, _PACK)
        tables = {"padded": df, "packs": packs}
        for name, table in tables.items():
            write_shards(table, f"{folder}/{name}", _data(name))
        num_packs = packs.count()
        packs_per_step = max(1, round(per_step / _PACK * sum(map(len, given)) / (_PACK * num_packs)))
        ours = functools.partial(_ours, spark, folder, threads, held_out)
        ways: dict[str, Callable[[int], Result]] = {
            "spark_dl": functools.partial(ours, "padded", _BATCH, {}),
            "spark_dl, sorted": functools.partial(
                ours, "padded", _BATCH, {"group_by_length": True, "max_tokens": 4 * _PACK}
            ),
            "spark_dl, packs": functools.partial(ours, "packs", packs_per_step, {}),
        }
        if importlib.util.find_spec("trl") is not None:
            theirs = functools.partial(_theirs, folder, given, held_out)
            ways["TRL"] = functools.partial(theirs, _BATCH, packs=False)
            ways["TRL, packs"] = functools.partial(theirs, packs_per_step, packs=True)
        else:
            print("TRL: not measured; pip install trl", file=sys.stderr)
        found: dict[str, list[Result]] = {name: [] for name in ways}
        for i in range(repeats + 1):
            for name, run in ways.items():
                result = run(i)
                found[name] += [result] if i else []
    rates = {name: statistics.median(rate for rate, _ in results) for name, results in found.items()}
    losses = {name: [loss for _, loss in results] for name, results in found.items()}
    for name, rate in rates.items():
        spread = f"{min(losses[name]):.3f} to {max(losses[name]):.3f}"
        print(f"{name:18} {rate:10,.0f} tokens/s {rate / rates['spark_dl']:6.2f}x  loss {spread}", file=sys.stderr)
    return {
        "tokens_per_s": rates, "losses": losses, "packs_to_padded": rates["spark_dl, packs"] / rates["spark_dl"],
        "pack_fill": sum(map(len, given)) / (_PACK * num_packs), "packs_per_step": packs_per_step, "repeats": repeats,
    }  # fmt: skip


def texts(count: int, seed: int) -> Texts:
    """Returns texts of a Markov chain: after each token come four others, more or less often. # 20 to 200 tokens"""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(np.log(_MEDIAN), 0.8, count)).round().clip(_SHORTEST, _LONGEST).astype(int)
    follows = np.random.default_rng(7).integers(1, _VOCABULARY, (_VOCABULARY, 4))
    made = []
    for length in lengths.tolist():
        text = [int(random.integers(1, _VOCABULARY))]
        for choice in random.choice(4, length - 1, p=[0.6, 0.2, 0.1, 0.1]):
            text.append(int(follows[text[-1], choice]))
        made.append(text)
    return made


def build(seed: int = 0) -> nn.Module:
    """Returns a GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=_VOCABULARY, n_positions=_PACK, n_embd=_HIDDEN, n_layer=_LAYERS, n_head=4, resid_pdrop=0,
            embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def _data(name: str) -> Data:
    columns = _COLUMNS[name]
    return Data(features=columns, label=None, encode={column: {"ragged": True} for column in columns})


def _ours(
    spark: SparkSession, folder: str, threads: int, held_out: Texts,
    name: str, batch: int, loader: dict[str, Any], seed: int,
) -> Result:  # fmt: skip
    spec = ModelSpec(build=functools.partial(build, seed), batch_loss=causal_lm_loss)
    config = Config(
        data=Data(features=_COLUMNS[name], label=None),
        train=Train(global_batch_size=batch, optimizer="AdamW", lr=_LR, log_every=1, seed=seed),
        loader=Loader(num_streams=min(batch, 4), **loader),
        parallel=Single(),
        launch=Launch(num_ranks=1, threads=threads),
        checkpoint=Checkpoint(keep=1),
    )
    with tempfile.TemporaryDirectory() as run_dir:
        result = train(f"{folder}/{name}", spec, config, run_dir=run_dir, spark=spark, progress=False)
        seconds = sum(line["seconds"] for line in read_metrics(run_dir) if line["kind"] == "step")
        model = result.load_model(spec)
    tokens = sum(len(row["input_ids"]) for row in spark.read.parquet(f"{folder}/{name}").select("input_ids").collect())
    return tokens / seconds, _loss(model, held_out)


def _theirs(folder: str, given: Texts, held_out: Texts, batch: int, seed: int, *, packs: bool) -> Result:
    from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,unused-ignore]

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(_VOCABULARY)}, "w0"))
    model, special = build(seed), {"pad_token": "w0", "eos_token": "w0"}
    trainer = SFTTrainer(
        model=model, train_dataset=Dataset.from_list([{"input_ids": text} for text in given]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
        args=SFTConfig(
            output_dir=f"{folder}/trl", per_device_train_batch_size=batch, num_train_epochs=1, learning_rate=_LR,
            lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=0.0, save_strategy="no", report_to=[],
            disable_tqdm=True, logging_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=seed,
            packing=packs, max_length=_PACK,
        ),
    )  # fmt: skip
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    seconds = time.perf_counter() - start
    return sum(map(len, given)) / seconds, _loss(model, held_out)


def _loss(model: nn.Module, held_out: Texts) -> float:
    """Returns the mean loss of the tokens of texts, each by itself."""
    total, count = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for text in held_out:
            ids = torch.tensor([text])
            total += float(model(input_ids=ids, labels=ids).loss) * (len(text) - 1)
            count += len(text) - 1
    return total / count
