"""Texts as tokens and as packs: what `tokenize` and `pack_rows` make of a DataFrame, and a language model of them."""

import shutil

import numpy as np
import pytest
import torch
import transformers
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import spark_dl
import spark_dl.ml
from spark_dl import ModelSpec
from tests.builders.models import small_config

pytestmark = pytest.mark.modes("local", "connect")

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "user",
    "assistant",
    ":",
    "hello",
    "there",
    "friend",
]
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<eos>", *WORDS]
ID = {word: i for i, word in enumerate(NAMES)}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
FORGETS = "{% for m in messages[-1:] %}{{ m['role'] }} : {{ m['content'] }} <eos> {% endfor %}"


def tokenizer(*, is_encoder=False, **settings):
    made = Tokenizer(models.WordLevel(ID, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if is_encoder:
        made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token=None if is_encoder else "<eos>",
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if is_encoder else [])], **settings,
    )  # fmt: skip


def ids(text):
    return [ID[word] for word in text.split()]


def rows_of(df, *names):
    return [tuple(row[name] for name in names) for row in df.orderBy("n").collect()]


@pytest.fixture
def texts(spark):
    rows = [(0, "the quick fox", "dog"), (1, "hello", "friend there fox"), (2, None, "dog"), (3, "dog fox dog fox", "")]
    return spark.createDataFrame(rows, "n int, text string, answer string").coalesce(1)  # one worker loads transformers


def test_texts_become_tokens_with_those_of_the_tokenizers_folder(texts, tmp_path):
    tokenizer(is_encoder=True).save_pretrained(tmp_path / "model")
    found = spark_dl.tokenize(texts, "text", str(tmp_path / "model"))
    assert found.columns == ["n", "text", "answer", "input_ids", "num_tokens"]
    assert rows_of(found, "input_ids", "num_tokens") == [
        ([2, *ids("the quick fox"), 3], 5), ([2, *ids("hello"), 3], 3), (None, None),
        ([2, *ids("dog fox dog fox"), 3], 6),
    ]  # fmt: skip


def test_rows_that_are_too_long_are_cut_dropped_or_an_error_and_counted(texts):
    made, truncated, dropped = (
        spark_dl.tokenize(texts, "text", tokenizer(is_encoder=True), max_length=4, too_long=policy)
        for policy in ("error", "truncate", "drop")
    )
    assert rows_of(truncated, "input_ids", "num_tokens") == [
        ([2, *ids("the quick"), 3], 5), ([2, *ids("hello"), 3], 3), (None, None), ([2, *ids("dog fox"), 3], 6),
    ]  # fmt: skip
    assert truncated.where("num_tokens > 4").count() == 2
    assert rows_of(dropped, "n", "input_ids") == [(1, [2, *ids("hello"), 3]), (2, None)]
    with pytest.raises(Exception, match="found 5 tokens, expected at most max_length=4, .*'the quick fox'; set too_lo"):
        made.where("n < 2").collect()


def test_pairs_have_types_and_completions_have_labels(texts):
    pairs = spark_dl.tokenize(texts, ["text", "answer"], tokenizer(is_encoder=True))
    assert rows_of(pairs, "input_ids", "token_type_ids")[0] == (
        [2, *ids("the quick fox"), 3, *ids("dog"), 3], [0, 0, 0, 0, 0, 1, 1],
    )  # fmt: skip
    answers = spark_dl.tokenize(texts, ["text", "answer"], tokenizer(), labels="completion")
    assert rows_of(answers, "input_ids", "labels") == [
        ([*ids("the quick fox dog"), 4], [-100] * 3 + [*ids("dog"), 4]),
        ([*ids("hello friend there fox"), 4], [-100, *ids("friend there fox"), 4]),
        (None, None), ([*ids("dog fox dog fox"), 4], [-100] * 4 + [4]),
    ]  # fmt: skip
    cut = spark_dl.tokenize(texts, "text", tokenizer(), labels="all", max_length=3, too_long="truncate")
    assert rows_of(cut, "input_ids", "labels", "num_tokens")[0] == (*[ids("the quick fox")] * 2, 4)


CHATS = (
    "SELECT 0 AS n, array(named_struct('role', 'user', 'content', 'hello'), named_struct('role', 'assistant', "
    "'content', 'hello there'), named_struct('role', 'user', 'content', 'fox'), named_struct('role', 'assistant', "
    "'content', 'dog')) AS chat UNION ALL SELECT 1, null"
)


def test_conversations_have_labels_of_the_assistant(spark):
    text = "user : hello <eos> assistant : hello there <eos> user : fox <eos> assistant : dog <eos>"
    found = spark_dl.tokenize(spark.sql(CHATS), "chat", tokenizer(chat_template=TEMPLATE), labels="assistant")
    places = {6, 7, 8, 15, 16}
    labels = [token if i in places else -100 for i, token in enumerate(ids(text))]
    assert rows_of(found, "input_ids", "labels") == [(ids(text), labels), (None, None)]
    all_of_it = spark_dl.tokenize(spark.sql(CHATS), "chat", tokenizer(chat_template=TEMPLATE), labels="all")
    assert rows_of(all_of_it, "labels")[0] == (ids(text),)


@pytest.mark.modes("local")
def test_B27_columns_that_cannot_be_tokenized_or_packed_are_named(spark, texts, tmp_path):
    def fails(message, function, *args, **kwargs):
        with pytest.raises((ValueError, RuntimeError), match=message):
            function(*args, **kwargs)

    tokenize, pack = spark_dl.tokenize, spark_dl.pack_rows
    fails("tokenize: there is no column 'txt'; did you mean 'text'", tokenize, texts, "txt", tokenizer())
    fails("expected a column of strings, .*found {'n': 'int'}", tokenize, texts, "n", tokenizer())
    fails("labels: expected None or one of .*found 'none'", tokenize, texts, "text", tokenizer(), labels="none")
    fails("'completion' needs two columns", tokenize, texts, "text", tokenizer(), labels="completion")
    fails("'all' needs one column", tokenize, texts, ["text", "answer"], tokenizer(), labels="all")
    fails("'assistant' needs a column of conv", tokenize, texts, "text", tokenizer(), labels="assistant")
    fails(
        "has the column 'num_tokens' already", tokenize, texts.withColumnRenamed("n", "num_tokens"), "text", tokenizer()
    )
    fails("expected max_length >= 1 .*found 0", tokenize, texts, "text", tokenizer(), max_length=0)
    fails("tokenizer '.*none' cannot be loaded: .*a folder on the driver", tokenize, texts, "text", tmp_path / "none")
    forgets = tokenize(spark.sql(CHATS), "chat", tokenizer(chat_template=FORGETS), labels="assistant")
    with pytest.raises(Exception, match=r"the chat template writes message 1 \('hello there'\) otherwise when others"):
        forgets.collect()
    fails("pack_rows: there is no column 'input_ids'", pack, texts, 8)
    fails("expected an array of numbers in 'text', found string", pack, texts, 8, tokens="text")
    fails("expected length >= 1, found 0", pack, texts, 0)
    made = spark.sql("SELECT array(1) AS input_ids, array(0) AS position_ids")
    fails("'position_ids' is made, found it among columns", pack, made, 4, columns=["position_ids"])
    arrays = spark.sql("SELECT array(1, 2, 3) AS input_ids, array(1, 2) AS labels")
    with pytest.raises(Exception, match="found a text of 3 tokens, expected at most length=2; cut or drop"):
        pack(arrays.drop("labels"), 2).collect()
    with pytest.raises(Exception, match="found 2 values in 'labels', expected 3 as in 'input_ids'"):
        pack(arrays, 4).collect()


def as_texts(packs):
    """The texts of packs, cut at the positions 0."""
    for row in packs:
        starts = np.flatnonzero(np.array(row["position_ids"]) == 0)
        assert len(starts) == row["num_documents"]
        assert len(row["input_ids"]) == len(row["position_ids"]) == len(row["labels"])
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            assert row["position_ids"][start:stop] == [*range(stop - start)]
            yield tuple(row["input_ids"][start:stop]), tuple(row["labels"][start:stop])


def test_each_text_is_in_one_pack_and_packs_depend_on_the_seed_only(spark):
    texts = spark.range(500).select(
        F.expr("transform(sequence(1, 1 + id % 19), i -> CAST(id AS INT))").alias("input_ids")
    )
    found = [
        sorted(map(tuple, spark_dl.pack_rows(texts.repartition(n), 32, seed=seed).collect()))
        for n, seed in ((1, 0), (5, 0), (5, 1))
    ]
    assert found[0] == found[1] != found[2]
    packs = spark_dl.pack_rows(texts, 32).collect()
    tokens = sum(len(row["input_ids"]) for row in packs)
    assert tokens == sum(1 + n % 19 for n in range(500))
    assert tokens / (32 * len(packs)) > 0.99
    expected = [((n,) * (1 + n % 19), (-100,) + (n,) * (n % 19)) for n in range(500)]
    assert sorted(as_texts(packs)) == sorted(expected)


def test_labels_and_more_columns_go_with_their_tokens(spark):
    rows = spark.sql(
        "SELECT ids AS input_ids, transform(ids, i -> 10 * i) AS labels, transform(ids, i -> i / 2) AS score "
        "FROM (SELECT transform(sequence(1, 1 + id % 5), i -> i) AS ids FROM range(40)) "
        "UNION ALL SELECT null, null, null"
    )
    packs = spark_dl.pack_rows(rows, 9, columns=["score"])
    assert packs.columns == ["input_ids", "labels", "score", "position_ids", "num_documents"]
    for row in packs.collect():
        assert row["score"] == [token / 2 for token in row["input_ids"]]
        expected = [-100 if at == 0 else 10 * n for n, at in zip(row["input_ids"], row["position_ids"], strict=True)]
        assert row["labels"] == expected
    assert sum(row["num_documents"] for row in packs.collect()) == 40


def build_gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(NAMES),
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    )  # fmt: skip


@pytest.mark.modes("local")
def test_packs_of_texts_train_and_have_the_loss_of_the_texts(spark, tmp_path):
    rng = np.random.default_rng(3)
    texts = [(" ".join(rng.choice(WORDS, rng.integers(1, 15))),) for _ in range(200)]
    tokens = spark_dl.tokenize(
        spark.createDataFrame(texts, "text string").coalesce(1), "text", tokenizer(), labels="all"
    )
    packs = spark_dl.pack_rows(tokens, 32)
    spec = ModelSpec(build=build_gpt2, batch_loss=spark_dl.nn.causal_lm_loss)
    names = ("input_ids", "labels", "position_ids")
    config = small_config(
        2, {"lr": 0.5, "epochs": 2},
        {"features": names, "label": None, "encode": {name: {"ragged": True} for name in names}},
    )  # fmt: skip
    result = spark_dl.train(packs, spec, config, run_dir=str(tmp_path / "run"))
    assert result.steps > 1
    found = spark_dl.evaluate(packs, spec, result.checkpoint)["loss"]
    model, total, count = result.load_model(spec), 0.0, 0
    for row in tokens.collect():
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss
        total, count = total + float(loss) * (ids.shape[1] - 1), count + ids.shape[1] - 1
    assert found == pytest.approx(total / count, rel=1e-5)


def build_mean():
    return torch.nn.Sequential(torch.nn.EmbeddingBag(len(NAMES), 4, mode="mean"), torch.nn.Linear(4, 1))


def of_tokens(model, batch):
    return model(batch["input_ids"])[:, 0]


@pytest.mark.modes("local")
def test_tokens_of_another_tokenizer_are_an_error_wherever_a_model_gets_them(spark, tmp_path):
    texts = spark.sql("SELECT 'the quick fox' AS text, 1.0f AS label FROM range(0, 40, 1, 1)")
    spec = ModelSpec(build=build_mean, forward=of_tokens, loss="MSELoss")
    data = {"features": ("input_ids",), "label": "label", "encode": {"input_ids": {"ragged": True}}}
    config = small_config(2, {"epochs": 1, "validation_fraction": 0.0}, data)
    tokens = spark_dl.tokenize(texts, "text", tokenizer())
    result = spark_dl.train(tokens, spec, config, run_dir=str(tmp_path / "run"))

    longer = tokenizer()
    longer("hello there friend", truncation=True, max_length=2)  # which tokenizers note in themselves
    same, unknown = spark_dl.tokenize(texts, "text", longer), tokens.withMetadata("input_ids", {})
    expected = spark_dl.evaluate(tokens, spec, result.checkpoint)
    assert [spark_dl.evaluate(df, spec, result.checkpoint) for df in (same, unknown)] == [expected] * 2
    assert spark_dl.predict(unknown, spec, result.checkpoint).count() == 40

    other = spark_dl.tokenize(texts, "text", tokenizer(is_encoder=True))
    with pytest.raises(ValueError, match=r"'input_ids': found the encoding number \(tokenizer: \w{64}\), the model"):
        spark_dl.predict(other, spec, result.checkpoint)
    for df, match in (
        (other, r"'input_ids': found the encoding number \(tokenizer: \w{64}\), expected number \(tokenizer: \w{64}"),
        (spark_dl.pack_rows(other, 8), "no column 'label'"),
    ):
        with pytest.raises(ValueError, match=match):
            spark_dl.evaluate(df, spec, result.checkpoint)
    with pytest.raises(ValueError, match="found the encoding number .tokenizer"):
        spark_dl.train(tokens, spec, config, validation=other, run_dir=str(tmp_path / "other"))
    packed = [spark_dl.pack_rows(df, 8).schema["input_ids"].metadata for df in (tokens, other)]
    assert packed[0] == tokens.schema["input_ids"].metadata != packed[1]


@pytest.mark.modes("local")
def test_a_pipeline_that_was_saved_takes_texts_without_the_folder_of_its_tokenizer(spark, texts, tmp_path):
    folder, saved = tmp_path / "model", str(tmp_path / "stage")
    tokenizer(is_encoder=True).save_pretrained(folder)
    expected = spark_dl.tokenize(texts, "text", str(folder), max_length=4, too_long="truncate").orderBy("n").collect()
    spark_dl.ml.TextTokenizer(inputCol="text", tokenizer=str(folder), maxLength=4).save(saved)
    shutil.rmtree(folder)
    stage = spark_dl.ml.TextTokenizer.load(saved)
    assert stage.transform(texts).orderBy("n").collect() == expected
    words = spark_dl.ml.TorchRegressor(
        build_mean, featuresCol="input_ids", labelCol="n", numRanks=1, saveFormat="export",
        runDir=str(tmp_path / "run"),
        settings={"data.encode": {"input_ids": {"ragged": True}}, "data.cast": {"n": "float32"}},
    )  # fmt: skip
    fitted = Pipeline(stages=[stage, words]).fit(texts.where("text IS NOT NULL"))
    fitted.save(str(tmp_path / "pipeline"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    some = texts.where("text IS NOT NULL")
    assert rows_of(loaded.transform(some), "prediction") == rows_of(fitted.transform(some), "prediction")
    pairs = stage.copy({stage.inputCols: ["text", "answer"], stage.tooLong: "drop", stage.maxLength: 6})
    assert rows_of(pairs.transform(texts), "n", "num_tokens") == [(2, None)]
    with pytest.raises(ValueError, match="TextTokenizer: set inputCol, or inputCols"):
        spark_dl.ml.TextTokenizer(tokenizer=tokenizer()).transform(texts)
    with pytest.raises(ValueError, match="TextTokenizer: set tokenizer"):
        spark_dl.ml.TextTokenizer(inputCol="text").transform(texts)
