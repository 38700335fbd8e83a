"""What the driver reads of its tasks' results: gradient sums, and no other objects.

The results of an RDD are pickles. PySpark unpickles them on the driver, so an executor that an attacker controls could
run code there. Here the driver reads them with a list of names, of which none does more than hold numbers.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import RDD

    from spark_dl.baselines.driver_loop.gradient_sum import GradientSum

_ARRAYS = {
    f"numpy.{core}.{name}"
    for core in ("_core", "core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
}
_NAMES = frozenset({
    "spark_dl.baselines.driver_loop.gradient_sum.GradientSum", "spark_dl.training.finite.Finding",
    "numpy.ndarray", "numpy.dtype", *_ARRAYS,
})  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(
                f"a task sent an object with {module}.{name}, expected a sum of gradients; it was not read, and the "
                "executors cannot be trusted"
            )
        return super().find_class(module, name)


def only_gradients(parts: RDD[GradientSum]) -> RDD[GradientSum]:
    """Returns the RDD. The driver reads only gradient sums in its results, and in those of RDDs that are made of it.

    Other results raise pickle.UnpicklingError. Called on the driver.
    """
    from pyspark.serializers import AutoBatchedSerializer, CPickleSerializer

    class Received(CPickleSerializer):  # type: ignore[misc]
        def loads(self, obj: bytes, encoding: str = "bytes") -> Any:
            return _Unpickler(io.BytesIO(obj), encoding=encoding).load()

        def __reduce__(self) -> Any:  # tasks write as ever
            return CPickleSerializer, ()

    # NOTE: RDDs take the serializer of their context. A context with this serializer, which is otherwise the user's
    # own, leaves all other RDDs of the session as they are.
    context = object.__new__(type(parts.ctx))
    context.__dict__.update(vars(parts.ctx), serializer=AutoBatchedSerializer(Received()))
    parts.ctx = context
    return parts
