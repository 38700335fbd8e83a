"""A trained model as a user-defined function, for Spark SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from spark_dl.scoring.scorer import Scorer
from spark_dl.scoring.tables import OpenScorer, Outputs, added_fields, batch_scorer, open_scorer, pack, trained_sources

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_VECTOR = ("type", "size", "indices", "values")
"""The fields of a vector of Spark ML, as Arrow has it."""


def build_udf(scorer: Scorer, of_first_rows: Callable[[], Outputs] | None = None) -> Any:
    """Returns the function. Called on the driver. Raises ValueError for features that are fields of structs.

    of_first_rows: as for `tables.trial`.
    """
    if nested := [name for name in scorer.config.data.features if "." in name]:
        raise ValueError(
            f"predict_udf: the feature {nested[0]!r} is a field of a struct; use predict, or train on a column"
        )
    return function_of(scorer, added_fields(scorer, of_first_rows))


def function_of(scorer: Scorer, types: dict[str, DataType]) -> Any:
    """Returns the function of the features, in their order. Called on the driver. # types: of its columns"""
    import pyspark
    from pyspark.sql import functions

    features = scorer.config.data.features
    packed, result = pack(scorer), _result_type(types)
    is_single = result.typeName() != "struct"

    def score(opened: OpenScorer, found: pa.Array | tuple[pa.Array, ...]) -> pa.Array:
        arguments = found if isinstance(found, tuple) else (found,)  # Spark passes a single argument as it is
        if len(arguments) != len(features):
            raise ValueError(f"predict_udf: expected the arguments {list(features)}, found {len(arguments)} arguments")
        batch = pa.RecordBatch.from_arrays(list(arguments), names=list(features))
        sources = trained_sources(_spark_schema(batch.schema), scorer)
        added = batch_scorer(opened, sources)(batch)
        return next(iter(added.values())) if is_single else pa.StructArray.from_arrays([*added.values()], [*added])

    # The functions get their hints as objects, from which Spark tells their kind.
    if tuple(int(n) for n in pyspark.__version__.split(".")[:2]) >= (4, 1):

        def of_arrow(batches: Any) -> Any:
            opened = open_scorer(packed)
            for arguments in batches:
                yield score(opened, arguments)

        of_arrow.__annotations__ = {"batches": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
        return functions.arrow_udf(of_arrow, result)

    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    def of_pandas(batches: Any) -> Any:
        opened = open_scorer(packed)
        for arguments in batches:
            series = arguments if isinstance(arguments, tuple) else (arguments,)
            found = score(opened, tuple(_from_pandas(argument) for argument in series))
            yield found.to_pandas() if is_single else pd.DataFrame.from_records(found.to_pylist())

    hints = Iterator[pd.Series] if is_single else Iterator[pd.DataFrame]
    of_pandas.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": hints}
    return functions.pandas_udf(of_pandas, result)


def _result_type(added: dict[str, DataType]) -> Any:
    """Returns the type of the only new column, or a struct of all."""
    from pyspark.sql.types import StructField, StructType

    types = list(added.values())
    return types[0] if len(types) == 1 else StructType([StructField(name, t) for name, t in added.items()])


def _spark_schema(arrow: pa.Schema) -> StructType:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    schema = StructType()
    for field in arrow:
        is_vector = pa.types.is_struct(field.type) and tuple(f.name for f in field.type) == _VECTOR
        schema = schema.add(field.name, VectorUDT() if is_vector else from_arrow_type(field.type))
    return schema


def _from_pandas(values: Any) -> pa.Array:
    if len(values) and hasattr(values.iloc[0], "toArray"):  # vectors of Spark ML
        return pa.array([np.asarray(v.toArray()) for v in values], pa.list_(pa.float64()))
    return pa.Array.from_pandas(values)
