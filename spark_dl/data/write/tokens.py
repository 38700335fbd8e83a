"""Texts as tokens, and several texts in one row, for language models. Both are steps in Spark before the training."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from spark_dl.config.checks import suggestion
from spark_dl.data.columns.ragged import Array, Ints
from spark_dl.data.write.spark_types import TOKENIZER
from spark_dl.spark_job import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IGNORED = -100
"""The label of tokens that are not predicted, as of `torch.nn.CrossEntropyLoss` and of transformers."""
Labels = Literal["all", "completion", "assistant"]
TooLong = Literal["error", "truncate", "drop"]
_SHOWN = 60
_ROWS_AT_ONCE = 10_000
_MADE, _GROUP, _ORDER = "spark_dl_tokens", "spark_dl_group", "spark_dl_order"


def tokenize(
    df: DataFrame,
    columns: str | Sequence[str],
    tokenizer: Any,
    *,
    labels: Labels | None = None,
    max_length: int | None = None,
    too_long: TooLong = "error",
) -> DataFrame:
    """Returns the DataFrame with the tokens of a text, a pair of texts, or a conversation.

    It adds `input_ids`, an array of int; `num_tokens`, their number before any are cut; `labels`, an array of int of
    the same length, if asked for; and `token_type_ids` of a pair, if the tokenizer makes them. A row with a null has
    nulls. Called on the driver; the tokens are made when the DataFrame is used, once if it is what shards are written
    from. Executors need the package transformers, but not the folder of the tokenizer. Works with Spark Connect, too.

    `input_ids` has a digest of the tokenizer in its metadata. Datasets and models keep it, so that a model never gets
    the tokens of another tokenizer silently.

    Args:
        columns: a column of strings; two of them, which become a pair; or a column of conversations, arrays of structs
            or maps with `role` and `content`, to which the chat template of the tokenizer is applied.
        tokenizer: the folder of a Hugging Face tokenizer on the driver, or the tokenizer.
        labels: for causal language models, which tokens are to be predicted; all others get -100. `all`;
            `completion`, those of the second of two columns; or `assistant`, those of the messages with this role. A
            text, or a completion, then ends with the `eos_token`. Labels are at the place of their token: models of
            transformers shift them.
        max_length: the most tokens of a row; None for no limit.
        too_long: for rows with more: `error`, `truncate` (for a conversation and with labels at the end), or `drop`.
            `num_tokens` says how many they are: `tokens.where("num_tokens > 512").count()`.

    Raises:
        ValueError: For columns that are not there or have another type, for labels that do not fit them, and for a
            DataFrame that has a column of a name that is added. While the DataFrame is computed, Spark raises the
            ValueError of a row that is too long, with the start of its text.
        RuntimeError: If transformers is not installed, or the folder is not that of a tokenizer.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "text": 2}, "?"))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)  # or the folder of one
        >>> texts = spark_dl.build_session("docs", master="local[2]").createDataFrame([("a text",)], "text string")
        >>> tokens = spark_dl.tokenize(texts, "text", tokenizer, max_length=256, too_long="truncate")
    """
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    from pyspark.sql import functions as F

    names = [columns] if isinstance(columns, str) else list(columns)
    is_chat = _check_columns(df, names)
    _check_labels(labels, names, is_chat=is_chat)
    if too_long not in get_args(TooLong) or (max_length is not None and max_length < 1):
        raise ValueError(
            f"tokenize: expected max_length >= 1 or None, and too_long one of {list(get_args(TooLong))}, found "
            f"{max_length} and {too_long!r}"
        )
    tokenizer = load_tokenizer(tokenizer)
    made = _Tokens(tokenizer, labels, max_length, too_long, is_chat, len(names))
    if taken := [name for name in (*made.arrays, "num_tokens") if name in df.columns]:
        raise ValueError(f"tokenize: the DataFrame has the column {taken[0]!r} already; rename it, or drop it")
    fields = [f"{name} array<int>" for name in made.arrays]

    def of_one(texts: Any) -> Any:
        return made(texts)

    def of_two(first: Any, second: Any) -> Any:
        return made(first, second)

    # The functions get their hints as objects, from which Spark tells their kind.
    of_one.__annotations__ = {"texts": pd.Series, "return": pd.DataFrame}
    of_two.__annotations__ = {"first": pd.Series, "second": pd.Series, "return": pd.DataFrame}
    cells = [F.to_json(F.col(quoted(name))) if is_chat else F.col(quoted(name)) for name in names]
    types = ", ".join([*fields, "num_tokens int"])
    call = F.pandas_udf(of_two if len(names) == 2 else of_one, types)
    if too_long == "drop":  # or Spark would compute the tokens once to filter, and once more
        call = call.asNondeterministic()
    known = {"input_ids": _metadata(tokenizer, is_chat=is_chat)}
    added = [
        F.col(f"{_MADE}.{name}").alias(name, metadata=known.get(name, {})) for name in [*made.arrays, "num_tokens"]
    ]
    rows = df.select("*", call(*cells).alias(_MADE)).select(*map(quoted, df.columns), *added)
    if too_long == "drop" and max_length is not None:
        rows = rows.where(F.col("num_tokens").isNull() | (F.col("num_tokens") <= max_length))
    return rows


def _check_columns(df: DataFrame, names: Sequence[str]) -> bool:
    """Returns whether they are a conversation."""
    fields = {field.name: field.dataType for field in df.schema.fields}
    for name in names:
        if name not in fields:
            raise ValueError(f"tokenize: there is no column {name!r}{suggestion(name, df.columns)}")
    types = [fields[name].simpleString() for name in names]
    if types in (["string"], ["string", "string"]):
        return False
    element = getattr(fields[names[0]], "elementType", None) if len(names) == 1 else None
    if element is not None and (
        element.simpleString() == "map<string,string>" or {"role", "content"} <= {*getattr(element, "names", ())}
    ):
        return True
    raise ValueError(
        "tokenize: expected a column of strings, two of them, or arrays of structs with role and content, found "
        f"{dict(zip(names, types, strict=True))}"
    )


def _check_labels(labels: str | None, names: Sequence[str], *, is_chat: bool) -> None:
    if labels not in (None, *get_args(Labels)):
        raise ValueError(f"tokenize: labels: expected None or one of {list(get_args(Labels))}, found {labels!r}")
    if labels == "completion" and len(names) != 2:
        raise ValueError(f"tokenize: labels='completion' needs two columns, a prompt and its completion; found {names}")
    if labels == "all" and len(names) == 2:
        raise ValueError(f"tokenize: labels='all' needs one column, found {names}; use 'completion', or F.concat")
    if labels == "assistant" and not is_chat:
        raise ValueError(f"tokenize: labels='assistant' needs a column of conversations, found {names}")


def load_tokenizer(tokenizer: Any) -> Any:
    """Returns the tokenizer of a folder, or the tokenizer itself. Raises RuntimeError if it cannot be loaded."""
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise RuntimeError(
            f"tokenize: the tokenizer {os.fspath(tokenizer)!r} cannot be loaded: {error}; it must be a folder on the "
            "driver with the files of a Hugging Face tokenizer, and the package transformers must be installed"
        ) from error


def _metadata(tokenizer: Any, *, is_chat: bool) -> dict[str, str]:
    """Returns the metadata of a column of tokens: a digest of what decides which tokens a text gets, if it is known."""
    made: dict[str, Any] = {"chat_template": getattr(tokenizer, "chat_template", None)} if is_chat else {}
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        made |= json.loads(fast.to_str())
        made |= {"truncation": None, "padding": None}  # which each call sets, as its arguments say
    elif hasattr(tokenizer, "get_vocab"):
        made |= {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    else:
        return {}
    return {TOKENIZER: hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()}


class _Tokens:
    """Makes the tokens of rows. Made on the driver, and called in Spark tasks."""

    def __init__(
        self, tokenizer: Any, labels: str | None, max_length: int | None, too_long: str, is_chat: bool, num_columns: int
    ):
        self._tokenizer, self._labels, self._is_chat = tokenizer, labels, is_chat
        self._max_length, self._too_long = max_length, too_long
        has_types = num_columns == 2 and labels is None and "token_type_ids" in tokenizer.model_input_names
        self.arrays = ["input_ids", *(["labels"] if labels else []), *(["token_type_ids"] if has_types else [])]
        """The columns of arrays."""
        self._cuts_itself = too_long == "truncate" and max_length is not None and labels is None and not is_chat

    def __call__(self, *texts: Any) -> Any:
        """Returns a pandas DataFrame with the arrays of each row. # texts: pandas Series"""
        import pandas as pd

        rows = [cells if all(cell is not None for cell in cells) else None for cells in zip(*texts, strict=True)]
        made = iter(self._made([row for row in rows if row is not None]))
        cut = [None if row is None else self._cut(next(made), row) for row in rows]
        columns: dict[str, Any] = {
            name: pd.Series([row and row[name] for row in cut], dtype=object) for name in self.arrays
        }
        columns["num_tokens"] = pd.array([row and row["num_tokens"] for row in cut], dtype="Int32")
        return pd.DataFrame(columns)

    def _made(self, rows: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
        if not rows:
            return []
        if self._is_chat:
            return [self._conversation(json.loads(text)) for (text,) in rows]
        if self._labels is not None:
            parts = [self._tokenizer([*column], verbose=False, **kwargs)["input_ids"] for column, kwargs in zip(
                zip(*rows, strict=True), ({}, {"add_special_tokens": False}), strict=False
            )]  # fmt: skip
            return [self._prompt(*ids) for ids in zip(*parts, strict=True)]
        made = self._arrays(rows)
        for row in made:
            row["num_tokens"] = len(row["input_ids"])
        long = [i for i, row in enumerate(made) if self._cuts_itself and row["num_tokens"] > self._max_length]
        cut = self._arrays([rows[i] for i in long], truncation=True, max_length=self._max_length) if long else []
        for i, arrays in zip(long, cut, strict=True):  # which have the special tokens at their end
            made[i] |= arrays
        return made

    def _arrays(self, rows: Sequence[tuple[str, ...]], **kwargs: Any) -> list[dict[str, Any]]:
        """Returns what the tokenizer makes of texts, or of pairs of texts."""
        made = self._tokenizer(*map(list, zip(*rows, strict=True)), verbose=False, **kwargs)
        return [{name: made[name][i] for name in self.arrays} for i in range(len(rows))]

    def _prompt(self, *parts: list[int]) -> dict[str, Any]:
        """Returns a text, or a prompt with its completion, and the labels of the last of them."""
        eos = self._tokenizer.eos_token_id
        last = parts[-1] if eos is None or parts[-1][-1:] == [eos] else [*parts[-1], eos]
        before = parts[0] if len(parts) == 2 else []
        return self._row([*before, *last], [IGNORED] * len(before) + [*last])

    def _conversation(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        ids = self._templated(messages)
        if self._labels != "assistant":
            return self._row(ids, ids)
        labels = [IGNORED] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                asked, answered = (
                    self._templated(messages[:i], add_generation_prompt=True),
                    self._templated(messages[: i + 1]),
                )
                if ids[: len(answered)] != answered or answered[: len(asked)] != asked:
                    raise ValueError(
                        f"tokenize: the chat template writes message {i} ({message['content']!r:.{_SHOWN}}) otherwise "
                        "when others follow, so that its tokens are not known; make a row of each answer, with "
                        "labels='completion'"
                    )
                labels[len(asked) : len(answered)] = answered[len(asked) :]
        return self._row(ids, labels)

    def _templated(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        made = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)["input_ids"]
        return list(made)

    def _row(self, ids: list[int], labels: list[int]) -> dict[str, Any]:
        return {"input_ids": ids, "num_tokens": len(ids), **({"labels": labels} if self._labels else {})}

    def _cut(self, row: dict[str, Any], texts: tuple[str, ...]) -> dict[str, Any]:
        most = self._max_length
        if most is None or row["num_tokens"] <= most or self._too_long == "drop":
            return row
        if self._too_long == "error":
            raise ValueError(
                f"tokenize: found {row['num_tokens']} tokens, expected at most max_length={most}, in the row with the "
                f"text {texts[0][:_SHOWN]!r}; set too_long to truncate or drop, or raise max_length"
            )
        return {**row, **{name: row[name][:most] for name in self.arrays}}


def pack_rows(
    df: DataFrame,
    length: int,
    *,
    tokens: str = "input_ids",
    labels: str = "labels",
    columns: Sequence[str] = (),
    seed: int = 0,
) -> DataFrame:
    """Returns a DataFrame whose rows are packs: several texts, one after another, of at most `length` tokens together.

    Packs leave out nearly all padding of texts of different lengths. Which texts are in a pack depends on the texts and
    on `seed` only, and not on partitions or ranks. Each text is in one pack, whole. It has the columns `tokens`,
    `labels` and `columns`, arrays of the pack; `position_ids`, the place of each token in its text, from 0, by which
    `spark_dl.nn.document_mask` keeps texts apart; and `num_documents`. The label of the first token of each text is
    -100, as no token before it is of the same text. Called on the driver. It counts the rows, and Spark then sorts them
    into groups of about 10,000, of which each is packed by itself (best fit, longest first). Rows in which `tokens` is
    null or empty are left out. Works with Spark Connect, too.

    Args:
        length: the most tokens of a pack.
        tokens: the column of arrays of integers, such as `tokenize` makes.
        labels: the column of labels for each token, or the name of the new one, of all tokens, if there is none.
        columns: more columns of arrays that are as long as `tokens`.
        seed: of which texts are together.

    Raises:
        ValueError: For columns that are not there or are no arrays. While the DataFrame is computed, Spark raises the
            ValueError of a text with more than `length` tokens, and of arrays of different lengths.

    Example:
        >>> texts = spark_dl.build_session("docs", master="local[2]").range(9).selectExpr("array(id, 1) AS input_ids")
        >>> packs = spark_dl.pack_rows(texts, 8)
    """
    from pyspark.sql import functions as F

    if length < 1:
        raise ValueError(f"pack_rows: expected length >= 1, found {length}")
    fields = {field.name: field.dataType.simpleString() for field in df.schema.fields}
    arrays = [tokens, *([labels] if labels in fields else []), *columns]
    for name in arrays:
        if name not in fields:
            raise ValueError(f"pack_rows: there is no column {name!r}{suggestion(name, df.columns)}")
        if not fields[name].startswith("array<") or fields[name].count("<") > 1:
            raise ValueError(f"pack_rows: expected an array of numbers in {name!r}, found {fields[name]}")
    if taken := [name for name in ("position_ids", "num_documents") if name in arrays]:
        raise ValueError(f"pack_rows: the column {taken[0]!r} is made, found it among columns; leave it out")
    cells = [F.col(quoted(name)) for name in arrays]
    texts = df.select(*cells).where(F.size(cells[0]) > 0)
    groups = max(1, round(texts.count() / _ROWS_AT_ONCE))
    texts = texts.select(
        *cells,
        F.pmod(F.xxhash64(F.lit(seed), *cells), F.lit(groups)).alias(_GROUP),
        F.xxhash64(F.lit(seed + 1), *cells).alias(_ORDER),
    )
    made = dict.fromkeys([*arrays, labels])
    types = ", ".join(f"`{name}` {fields.get(name, fields[tokens])}" for name in made)
    pack = _packer(length, arrays, tokens, labels, seed)
    packs = texts.groupBy(_GROUP).applyInPandas(pack, f"{types}, position_ids array<int>, num_documents int")
    return packs.withMetadata(tokens, df.schema[tokens].metadata)


def _packer(length: int, arrays: Sequence[str], tokens: str, labels: str, seed: int) -> Callable[[Any], Any]:
    """Returns the function that packs a group of texts, a pandas DataFrame, in Spark tasks."""

    def pack(rows: Any) -> Any:
        import pandas as pd

        rows = rows.sort_values(_ORDER, kind="stable")
        lengths = rows[tokens].map(len).to_numpy(np.int64)
        cells = {name: [*rows[name]] for name in arrays}
        for name, of_column in cells.items():
            for n, cell in zip(lengths.tolist(), of_column, strict=True):
                if cell is None or len(cell) != n:
                    found = "null" if cell is None else f"{len(cell)} values"
                    raise ValueError(f"pack_rows: found {found} in {name!r}, expected {n} as in {tokens!r}")
        made: dict[str, list[Any]] = {name: [] for name in [*arrays, labels, "position_ids", "num_documents"]}
        packs = pack_lengths(lengths, length)
        for at in np.random.default_rng(seed).permutation(len(packs)).tolist():
            texts = packs[at]
            ends = np.cumsum(lengths[texts])
            starts = ends - lengths[texts]
            for name in arrays:
                made[name].append(np.concatenate([cells[name][text] for text in texts]))
            of_pack = made[labels][-1] if labels in arrays else made[tokens][-1].copy()
            of_pack[starts] = IGNORED
            if labels not in arrays:
                made[labels].append(of_pack)
            positions = np.arange(ends[-1]) - np.repeat(starts, lengths[texts])
            made["position_ids"].append(positions.astype(np.int32))
            made["num_documents"].append(len(texts))
        return pd.DataFrame(made)

    return pack


def pack_lengths(lengths: Array, length: int) -> list[Ints]:
    """Returns the texts of each pack, by best fit: the longest first, each to the fullest pack that has room.

    Raises ValueError for a text that is longer than a pack.

    Args:
        lengths: of the texts. # (texts,)
        length: of a pack.
    """
    longest = int(lengths.max(initial=0))
    if longest > length:
        raise ValueError(
            f"pack_rows: found a text of {longest} tokens, expected at most length={length}; cut or drop longer ones "
            "(tokenize has max_length and too_long), or raise length"
        )
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (room, pack), sorted
    for text in np.argsort(-lengths, kind="stable").tolist():
        n = int(lengths[text])
        at = bisect.bisect_left(open_packs, (n, -1))
        if at == len(open_packs):
            packs.append([text])
            room, pack = length, len(packs) - 1
        else:
            room, pack = open_packs.pop(at)
            packs[pack].append(text)
        if room > n:
            bisect.insort(open_packs, (room - n, pack))
    return [np.array(texts, np.int64) for texts in packs]
