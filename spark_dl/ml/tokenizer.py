"""A stage that makes tokens of texts, so that a pipeline takes texts, also after it was saved and loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.ml import Transformer
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasInputCols
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame

from spark_dl.data.write.tokens import load_tokenizer, tokenize
from spark_dl.storage.owner import temporary_prefix


def _to_files(value: Any) -> dict[str, str]:
    """Returns the files of a tokenizer by name: those of a folder, of a tokenizer, or these themselves."""
    if isinstance(value, Mapping):
        return {str(name): str(text) for name, text in value.items()}
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        load_tokenizer(value).save_pretrained(folder)
        return {path.name: path.read_text() for path in sorted(Path(folder).iterdir()) if path.is_file()}


class TextTokenizer(
    Transformer, HasInputCol, HasInputCols, DefaultParamsReadable["TextTokenizer"], DefaultParamsWritable
):
    """Adds the tokens of texts, as `spark_dl.tokenize` does, to a DataFrame: `input_ids` and `num_tokens`.

    It has the files of the tokenizer in itself, so that a saved pipeline needs no folder. A model behind it has
    `featuresCol="input_ids"`, and `data.encode: {input_ids: {ragged: true}}` in its settings.

    Args:
        inputCol: the column of texts, or of conversations.
        inputCols: two columns of texts, which become a pair, instead of `inputCol`.
        tokenizer: the folder of a Hugging Face tokenizer on the driver, or the tokenizer.
        maxLength: the most tokens of a row; by default there is no limit.
        tooLong: what becomes of rows with more: `truncate`, `drop` or `error`.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0, "text": 1}, "?")))
        >>> stage = spark_dl.ml.TextTokenizer(inputCol="text", tokenizer=words, maxLength=256)
    """

    tokenizer = Param(Params._dummy(), "tokenizer", "the files of the tokenizer, by name.", _to_files)
    maxLength = Param(Params._dummy(), "maxLength", "the most tokens of a row.", TypeConverters.toInt)
    tooLong = Param(
        Params._dummy(), "tooLong", "truncate, drop or error, for rows with more tokens.", TypeConverters.toString
    )

    def __init__(
        self,
        *,
        inputCol: str | None = None,
        inputCols: Sequence[str] | None = None,
        tokenizer: Any = None,
        maxLength: int | None = None,
        tooLong: str | None = None,
    ):
        super().__init__()
        self._setDefault(tooLong="truncate")
        given = {"inputCol": inputCol, "inputCols": inputCols, "maxLength": maxLength, "tooLong": tooLong}
        self._set(**{name: v for name, v in {**given, "tokenizer": tokenizer}.items() if v is not None})

    def _transform(self, dataset: DataFrame) -> DataFrame:
        has_columns = self.isSet(self.inputCols) or self.isSet(self.inputCol)
        if not has_columns or not self.isSet(self.tokenizer):
            raise ValueError(f"TextTokenizer: set {'tokenizer' if has_columns else 'inputCol, or inputCols'}")
        columns = self.getInputCols() if self.isSet(self.inputCols) else self.getInputCol()
        with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
            for name, text in self.getOrDefault(self.tokenizer).items():
                Path(folder, os.path.basename(name)).write_text(text)
            tokenizer = load_tokenizer(folder)
        return tokenize(
            dataset, columns, tokenizer, too_long=self.getOrDefault(self.tooLong),
            max_length=self.getOrDefault(self.maxLength) if self.isSet(self.maxLength) else None,
        )  # fmt: skip
