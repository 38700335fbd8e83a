"""Petastorm's metadata and codecs: what it wrote is read right, what others made up is refused and never run."""

import base64
import collections
import contextlib
import decimal
import gc
import hashlib
import importlib
import io
import json
import os
import pickle
import struct
import subprocess
import threading
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.schema import Column
from spark_dl.data.petastorm import codecs as npy_cells
from spark_dl.data.petastorm.codecs import decode
from spark_dl.data.petastorm.columns import petastorm_column
from spark_dl.data.petastorm.metadata import (
    ROW_GROUPS_KEY,
    UNISCHEMA_KEY,
    common_metadata,
    hive_partitions,
    unischema_of,
    write_common_metadata,
)
from spark_dl.data.petastorm.unischema import (
    DTYPES,
    Codec,
    Field,
    Unischema,
    UnsafeMetadataError,
    read_unischema,
    write_unischema,
)
from tests.builders.petastorm import Reduced, read_dataset

NDARRAY, ZIPPED = Codec("ndarray"), Codec("compressed_ndarray")
NUMBERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
           "float64", "complex64"]  # fmt: skip


def scalar(spark_type):
    return Codec("scalar", spark_type=spark_type)


# By Petastorm 0.13.1 with NumPy 1.26.4 and PySpark 3.5.9, then zlib and base85: the Unischema below, with protocol 0
# (whose opcodes are those of Python 2) and 4 (the default).
REAL_PICKLES = {
    0: (
        "c-oCs!H%0q5IyXzzQmVUG&Imixg}Z&De|r|Sxze<jByVW3>_LD{P+8++;%cJne1q$2b$`tSFfsGx9#LE_1sy)(oUma=5xDDGr5R1t?QP?<L$"
        "IPkG*f7yHi8|+@GAHwyyW*epvdku4&r8bnQYerrqKa`s_4q4lbpt9-C7~E~Dy+Tu#2Kk9{{BJUK&cI}HPl^@vS>&4+I84j+4VQ_yDl>{LV*h"
        "f-vJi|9}G3fuTKuI20ogjWe|Ec~?N`Q$Ftk4q9`7a*6F>vlSHt*5898JhV6zrZdfD~YKLnW>ypQwF(t*UVq*<>EL*5l~)ack90mTmIsy9GA{"
        "^^A|CTqu?u6@D<18_hl3j-V<IlZ>FGW57SIMTI6IU0c?Z>j>FVQ3NgTxSAT|np33gf%yV-Ixx__?pF{|iC@Ld`!0?5I3zuj_hhdVgqGKaON2"
        "Am*$O3!z&QFrF1H=3zi1TYoo|d^E?UfOIV?;9}`a2_<8PUv$W=2q5y=DX(Ez;^w%|IW+f2Z>YVA`;kLV7ZK3s`V+MV6{?JdJTYP2{+y%3)l3"
        "kFJGDN+sIVR~`++M=~lCygoPn@0(RQ9w&Usg=)XQrI#9B3V6=g0S}2<rI+11_KcP_u!vD^P5jH`WXUgT{$V-+r1#ySJT<lpwa;|OCrdeM#`$"
        "D9`nYGKx(!z7?Cpz#EV!)Tf&F%FhJLwVd?PCHcS|7W#>ttQoKrr+K(7+OMo3_PSvrrd$y3?@L7x2<`Rl&T^MF0)QszbITf;yMH;zH$RKRSK6"
        "$WhFFig_`2!_Xgcg?}1yzp2X7N=)?HS6={cK&dkbb~&sjv6WjKB6cfDHue-^+~9DkB<rMcDwQ&CXD|$SfOdZk-`;WxbD+fFoYtfE2@H9qu|z"
        "15%)$9d5PA|!8@<CZkR^PhQM$I3{K~6dphI0P)S}?jcp_`&Z9T{s((mCMX3bNBo+IUJXDm^zO6&Wx{)8)3kJXX<KJ_HpZ~M+k%FqB0er<WFT"
        "NG?s8lS^i9Bn0UQ?#7YOHRgDP?38+G3{dh3|t0+Ts;$xJ*I<P~)|5s8}Gxa-AtCvuMW;BBdb8yyjwN5cMm2DjuR1_bzIdZs|`QrV;m2^cXS`"
        "2B63s5}N#mTz!EbzceRz6)ctLyAvrQG@5}*Ss~868rkQ;9{2`~)<CfnfO0>Do`N(#z|=hXN{cEg$n+a9KTS8WSNi*TDIdi8j!;VhwG<FC?LA"
        "-Fmajv;`Yhi}d<$8=4p{mv3nz=DWdUNbv8)0-@s`J#N7u>($*@@I3TXf<rIM;xAw%-E5_P}*4~%7t$p"
    ),
    4: (
        "c-nPSU2oGc6m6S!?b<R1jE@(1L4xijVlbfzA%WCsQt1eYZajcc<Rnh)EnkZri98^-2euaZZRYpFwfnUeNYyCu^*QJI+>_JluNT#lzQnB*bHs"
        "R(MP?pT<`NtsDOL|>&zExZOn#FcQL|$dVJXT3DeAUQap*BAT5b}C*yS{d)!Vzw!x{E=smm4e1K`R?l9E`PG43fO6g#9XYH=Q=g%mX!^Jh;LL"
        "afglauW}`ign<k5M^EUI_*caY?h+z*ycqFP2ETf{c5t4&{Rtb){8j~aCV?}Xc%)wT%N%Z97)zX<N>)Z>VBA@v39>=olA04v@H*187i*m4aYE"
        "7!yW^y%6Mk08rjh8kh|obXbyNr<KQ29o(67-Ixx}*h2Y@s<Y|ecHCdmNDDPL(43-&~Ec;DSW8epteM77h#NJO!z1UCWFn4CESgXE<c568pyr"
        "a%og`aVuj=9lIBA{gqd%Xw+c){L|Xxmh++Ik2uA@eB3ffNn<Bu63Th3xO;Qz2gqy#=8ar{I_=XRIGe<j!2=zpe%v{ZX~)BuS`kwI<9&*FLM7"
        "$H$h4ioY#K!wU)F0t?D7rDa)fe#512{Suc>-vIT8ATgn#nkEnpC#NB&DyjxJqS$Wh2tw8}Y(_a0b(d1CFdaJBLcWL!-I+@g^tWKQVT?bhl01"
        "i9i|R*Oy&yyw5Szt`o3m*h>s_aC)TW0x<}||3x0mB_?Esb;M^Sn;WfLPq&F~W#8etL#>c5O{>?ex>)zF-@$$j`79znLBkS+2GLbDI^JcOxy0"
        "{49qkgsrn@6g@|1TJ&O`~#mou;l"
    ),
}
REAL = Unischema(
    "S",
    (
        Field("a", "int32", (), scalar("IntegerType")),
        Field("b", "float32", (2, None), NDARRAY, nullable=True),
        Field("c", "str", (), scalar("StringType")),
        Field("d", "decimal", (), scalar("DecimalType(10,3)")),
        Field("e", "uint8", (4, 4, 3), Codec("image", "jpeg", 70)),
        Field("f", "bytes", (None,), ZIPPED, nullable=True),
        Field("g", "bool"),
        Field("h", "float32", (3,), NDARRAY),  # numpy_dtype was np.dtype("float32")
        Field("i", "int64", (3,), NDARRAY),  # numpy_dtype was int, the shape (np.int64(3),)
        Field("j", "str", (), scalar("StringType")),  # numpy_dtype was str
        Field("k", "datetime64", (), scalar("TimestampType"), nullable=True),
        Field("l", "int64", (), scalar("LongType"), nullable=True),  # numpy_dtype was np.longlong
    ),
)


def real_pickle(protocol):
    return zlib.decompress(base64.b85decode(REAL_PICKLES[protocol]))


def npy(value, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(value), version=version)
    return file.getvalue()


def npy_header(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|i1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def npz(value):
    file = io.BytesIO()
    np.savez_compressed(file, arr=value)
    return file.getvalue()


def cells(*values):
    return pa.array(values, pa.binary())


# --- The Unischema ---


@pytest.mark.parametrize("protocol", [0, 4])
def test_petastorms_own_pickles_are_read(protocol):
    assert read_unischema(real_pickle(protocol)) == REAL


@pytest.mark.parametrize("package", ["av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit"])
def test_the_old_names_of_the_package_are_read(package):
    pickled = real_pickle(0).replace(b"petastorm.", package.encode() + b".")
    assert read_unischema(pickled) == REAL


@pytest.mark.parametrize(("old", "new"), [(b"cnumpy\nstr_", b"cnumpy\nunicode_"),
                                          (b"cnumpy\nbytes_", b"cnumpy\nstring_"),
                                          (b"cnumpy\nbool_", b"cnumpy\nbool"), (b"numpy.core.", b"numpy._core."),
                                          (b"copy_reg", b"copyreg"), (b"__builtin__", b"builtins")])  # fmt: skip
def test_names_of_other_versions_of_numpy_and_python_are_read(old, new):
    assert old in real_pickle(0)
    assert read_unischema(real_pickle(0).replace(old, new)) == REAL


def test_what_is_written_reads_the_same():
    assert read_unischema(write_unischema(REAL)) == REAL
    assert read_unischema(write_unischema(Unischema("empty", ()))) == Unischema("empty", ())


def random_unischema(rng):
    spark_types = ["LongType", "StringType", "DecimalType(38,18)", "VarcharType(7)", "ArrayType(ArrayType(FloatType))"]
    codecs = [None, NDARRAY, ZIPPED, Codec("image", "png"), Codec("image", "jpg", 1), *map(scalar, spark_types)]
    dtypes = sorted(DTYPES)
    fields = []
    for i in range(int(rng.integers(0, 300))):
        shape = tuple(None if rng.random() < 0.3 else int(rng.integers(0, 2**31)) for _ in range(rng.integers(0, 4)))
        name = f"{rng.choice(['x', 'fields', '_name', 'größe', 'make_namedtuple'])}{i or ''}"
        codec = codecs[rng.integers(len(codecs))]
        fields.append(Field(name, str(rng.choice(dtypes)), shape, codec, nullable=bool(rng.random() < 0.5)))
    return Unischema("名", tuple(fields))


def test_any_unischema_is_written_and_read_the_same():
    rng = np.random.default_rng(0)
    for _ in range(20):
        unischema = random_unischema(rng)
        assert read_unischema(write_unischema(unischema)) == unischema


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Field("", "int8"), "name"),
        (lambda: Field("x", "int7"), "'x'.*dtype.*int7"),
        (lambda: Field("x", "int8", (-1,)), "'x'.*shape"),
        (lambda: Field("x", "int8", (2**31,)), "'x'.*shape"),
        (lambda: Field("x", "int8", (True,)), "'x'.*shape"),
        (lambda: Field("x", "int8", nullable=1), "'x'.*nullable"),
        (lambda: Unischema("u", (Field("x", "int8"), Field("x", "int8"))), "a field twice"),
        (lambda: REAL.field("z"), "no field 'z'"),
        (lambda: Codec("pickle"), "expected one of"),
        (lambda: Codec("image"), "format"),
        (lambda: Codec("ndarray", "png"), "format"),
        (lambda: Codec("ndarray", quality=3), "quality"),
        (lambda: Codec("image", "png", "high"), "quality"),
        (lambda: Codec("scalar"), "Spark type"),
        (lambda: Codec("ndarray", spark_type="LongType"), "Spark type"),
        (lambda: scalar("os.system"), "Spark type"),
        (lambda: scalar("DecimalType"), r"DecimalType\(precision,scale\)"),
        (lambda: scalar("LongType(3)"), "LongType"),
        (lambda: Field("x", "int64", (1,) * 65), "field 'x': found a shape of 65 axes"),
        (lambda: scalar("ArrayType(system)"), "Spark type"),
    ],
)
def test_fields_and_codecs_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- Hostile metadata ---


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def command(canary):
    return f"touch {canary}"


def statement(canary):
    return f"open({str(canary)!r}, 'w').close()"


CALLS = {
    "eval": lambda c: Reduced(eval, statement(c)),
    "exec": lambda c: Reduced(exec, statement(c)),
    "open": lambda c: Reduced(open, str(c), "w"),
    "os.system": lambda c: Reduced(os.system, command(c)),
    "Popen": lambda c: Reduced(subprocess.Popen, ["touch", str(c)]),
    "check_call": lambda c: Reduced(subprocess.check_call, ["touch", str(c)]),
    "getattr": lambda c: Reduced(getattr, Reduced(importlib.import_module, "os"), "system"),
    "import": lambda c: Reduced(__import__, "os"),
    "namedtuple": lambda c: Reduced(collections.namedtuple, "UnischemaField", "a b"),
    "ndarray": lambda c: np.arange(3),
    "np.load": lambda c: Reduced(np.load, str(c), None, True),
    "path": lambda c: Reduced(Path, str(c)),
    "set": lambda c: {1, 2},
    "inside a schema": lambda c: {"_name": "S", "_fields": Reduced(os.system, command(c))},
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", CALLS)
def test_S01_calls_are_refused_and_not_made(tmp_path, call, protocol):
    canary = tmp_path / "canary"
    with pytest.raises(UnsafeMetadataError):
        read_unischema(pickle.dumps(CALLS[call](canary), protocol))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"), ("builtins", "getattr"), ("__builtin__", "eval"), ("__builtin__", "apply"),
        ("posix", "system"), ("nt", "system"), ("subprocess", "Popen"), ("importlib", "import_module"),
        ("operator", "attrgetter"), ("functools", "partial"), ("copyreg", "add_extension"), ("copyreg", "__newobj__"),
        ("numpy", "load"), ("numpy", "fromfile"), ("numpy.f2py.crackfortran", "getlincoef"),
        ("numpy.testing._private.utils", "runstring"), ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.function_base", "os.system"), ("numpy", "f2py.crackfortran.getlincoef"),
        ("collections", "namedtuple"), ("collections", "_sys.modules"), ("decimal", "Context"),
        ("petastorm.codecs", "cv2"), ("petastorm.codecs", "NdarrayCodec.__init__.__globals__"),
        ("petastorm.unischema", "sys"), ("petastorm.etl.legacy", "restricted_loads"), ("petastorm.codecs", "MyCodec"),
        ("pyspark.serializers", "CPickleSerializer"), ("pyspark.cloudpickle", "subimport"),
        ("pyspark.sql.types", "_parse_datatype_string"), ("pyspark.sql.types", "StructType"), ("_codecs", "lookup"),
        ("av.ml.dataset_toolkit.sequence", "Sequence"), ("Petastorm.codecs", "NdarrayCodec"),
    ],
)  # fmt: skip
def test_S01_only_the_names_of_the_list_are_found_and_others_are_said(tmp_path, module, name):
    for pickled in (f"c{module}\n{name}\n.".encode(), b"\x80\x04" + text(module) + text(name) + b"\x93."):
        with pytest.raises(UnsafeMetadataError) as caught:
            read_unischema(pickled)
        assert repr(module) in str(caught.value)
        assert repr(name) in str(caught.value)


def opcodes(canary):
    """Pickles that take other ways than a plain call."""
    touch = command(canary)
    system = text("posix") + text("system") + b"\x93"
    codec = b"cpetastorm.codecs\nNdarrayCodec\n"
    state = b"}" + text("__setstate__") + system + b"s"
    return {
        "names from the memo": b"\x80\x04" + text("posix") + b"\x94" + text("system") + b"\x940" + b"0h\x00h\x01\x93"
        + text(touch) + b"\x85R.",
        "names from the memo, no pop": b"\x80\x04" + text("posix") + b"\x94" + text("system") + b"\x94\x93"
        + text(touch) + b"\x85R.",
        "INST": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "NEWOBJ": b"\x80\x04" + system + text(touch) + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04" + system + text(touch) + b"\x85}\x92.",
        "BUILD of a class": b"\x80\x04" + codec + state + b"b.",
        "BUILD of slots of a class": b"\x80\x04" + codec + b"N" + state + b"\x86b.",
        "BUILD of a type": b"\x80\x04cnumpy\nint8\n" + state + b"b.",
        "BUILD of a function": b"\x80\x04ccopyreg\n_reconstructor\n" + state + b"b.",
        "BUILD of text": b"\x80\x04" + text("x") + state + b"b.",
        "EXT1": b"\x82\x01.", "EXT2": b"\x83\x01\x00.", "EXT4": b"\x84\x01\x00\x00\x00.",
        "PERSID": b"Pposix.system\n.", "BINPERSID": text("x") + b"Q.",
        "call of a type": b"cbuiltins\nstr\n" + text("x") + b"\x85R.",
        "call of Decimal": b"cdecimal\nDecimal\n(I1\ntR.",
        "_reconstructor of a type": b"ccopyreg\n_reconstructor\n(cbuiltins\nint\ncbuiltins\nobject\nNtR.",
        "_reconstructor of itself": b"ccopyreg\n_reconstructor\n(ccopyreg\n_reconstructor\ncbuiltins\nobject\nNtR.",
        "_reconstructor on a type": b"ccopyreg\n_reconstructor\n(" + codec + b"cbuiltins\nstr\nS'x'\ntR.",
        "_reconstructor alone": b"ccopyreg\n_reconstructor\n)R.",
        "_restore of another": b"cpyspark.serializers\n_restore\n(S'A'\n(S'b'\nt(I1\nttR.",
        "_restore of other names": b"cpyspark.serializers\n_restore\n(S'UnischemaField'\n(S'__class__'\nt(I1\nttR.",
        "encode": b"c_codecs\nencode\n(" + text("x") + text("rot13") + b"tR.",
        "scalar of objects": b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(S'O8'\ntRC\x01xtR.",
        "dict of numbers": b"ccollections\nOrderedDict\n(]p0\n(I1\nI2\ntp1\natp2\nR.", "persistent id": b"Pabc\n.",
        "scalar of floats": b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(S'f8'\ntRC\x08" + bytes(8) + b"tR.",
        "memo index": b"N" + b"r" + struct.pack("<I", 2**32 - 1) + b".",
        "memo index in text": b"Np99999999999\n.", "negative memo index": b"Np-1\n.",
        "memo that is not there": b"h\x07.", "memo of a mark": b"(q\x00.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
        "text": b"X" + struct.pack("<I", 2**32 - 1) + b"x.",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        "digits": b"L" + b"9" * 1_000_000 + b"L\n.",
        "empty": b"", "stop": b".", "nothing": b"N.", "protocol": b"\x80\xffN.", "garbage": bytes(range(256)),
        "not closed": b"(.", "not opened": b"t.",
    }  # fmt: skip


@pytest.mark.parametrize("way", opcodes(""))
def test_S01_other_ways_into_pickle_are_refused(tmp_path, way):
    canary = tmp_path / "canary"
    with pytest.raises(UnsafeMetadataError):
        read_unischema(opcodes(canary)[way])
    assert not canary.exists()
    assert read_unischema(real_pickle(4)) == REAL  # nothing of ours was changed


NESTED = {
    "twice": b")" + b"q\x00h\x00\x86" * 80,  # 2**80 leaves to hash
    "deep": b")" + b"\x85" * 100_000,
    "deep objects": b"cpetastorm.codecs\nNdarrayCodec\nq\x00" + b"h\x00" * 60_000 + b")\x81" + b"\x85\x81" * 60_000,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize(
    "form", [b"}%bNs.", b"}(%bNu.", b"(%bNd.", b"ccollections\nOrderedDict\n((%bNltltR.", b"%b.", b"%b}b."]
)
def test_S01_keys_that_would_be_hashed_for_ever_are_refused(form, nested):
    with pytest.raises(UnsafeMetadataError):
        read_unischema(b"\x80\x02" + form % NESTED[nested])


def test_S01_too_many_bytes_or_opcodes_are_refused():
    with pytest.raises(UnsafeMetadataError, match="16777218 bytes"):
        read_unischema(b"\x80\x02" + b"N" * (16 << 20))
    with pytest.raises(UnsafeMetadataError, match="1000000 opcodes"):
        read_unischema(b"(" + b"}" * 3_000_000 + b"t.")


def test_a_long_shape_that_fields_share_is_refused_at_once():
    """Each of the fields would look at all of its axes, and keep them."""
    shape = b"(" + b"K\x01" * 500_000 + b"tr\x00\x00\x00\x00"
    field = b"cpetastorm.unischema\nUnischemaField\n(%scnumpy\nfloat32\n%sN\x89t\x81"
    shapes = [shape, *[b"j\x00\x00\x00\x00"] * 199]
    fields = b"".join(text(f"f{i}") + field % (text(f"f{i}"), s) for i, s in enumerate(shapes))
    state = b"}(" + text("_name") + text("S") + text("_fields") + b"}(" + fields + b"uub."
    with pytest.raises(UnsafeMetadataError, match="a shape that is not a tuple of at most 64 axes"):
        read_unischema(b"\x80\x02cpetastorm.unischema\nUnischema\n)\x81" + state)


def test_a_pickle_cut_short_anywhere_is_refused():
    for pickled in (real_pickle(4), write_unischema(REAL)):
        for length in range(len(pickled)):
            with pytest.raises(UnsafeMetadataError):
                read_unischema(pickled[:length])


def test_changed_bytes_give_a_unischema_or_the_error():
    rng = np.random.default_rng(1)
    for pickled in (real_pickle(0), real_pickle(4), write_unischema(REAL)):
        for _ in range(700):
            changed = bytearray(pickled)
            for position in rng.integers(0, len(pickled), size=int(rng.integers(1, 4))):
                changed[position] = rng.integers(256)
            with contextlib.suppress(UnsafeMetadataError):
                assert isinstance(read_unischema(bytes(changed)), Unischema)


# --- Metadata of datasets ---


def test_the_unischema_of_our_shards():
    columns = (
        Column("id", "int64"), Column("flag", "bool"), Column("x", "float32", (2, 3), "ndarray"),
        Column("text", "uint8", (None,), "binary", Encoding("bytes")), Column("clicks", "int16", (None,), "list"),
        Column("photo", "uint8", (4, 5, 3), "image", Encoding("image")),
        Column("any", "uint8", (4, 5), "image", Encoding("image", resize=(4, 5))),
    )  # fmt: skip
    assert unischema_of(columns) == Unischema(
        "Schema",
        (
            Field("id", "int64", (), scalar("LongType")),
            Field("flag", "bool", (), scalar("BooleanType")),
            Field("x", "float32", (2, 3), NDARRAY),
            Field("text", "bytes", (), scalar("BinaryType")),
            Field("clicks", "int16", (None,)),
            Field("photo", "uint8", (4, 5, 3), Codec("image", "png")),
            Field("any", "uint8", (None, None), Codec("image", "png")),
        ),
    )


@pytest.mark.parametrize("column", [Column("a b", "int64"), Column("class", "int64"), Column("_x", "int64"),
                                    Column("x", "uint64"), Column("x", "int64", (2,), "list"),
                                    Column("x", "int64", (None, 2), "list")])  # fmt: skip
def test_columns_that_petastorm_cannot_have_are_refused(column):
    with pytest.raises(ValueError, match=f"'{column.name}'"):
        unischema_of([column])


def test_what_we_store_is_decoded_by_its_unischema():
    rng = np.random.default_rng(2)
    for dtype in ("bool", "int8", "int32", "int64", "float32", "float64"):
        for shape in ((), (3,), (2, 1, 3)):
            column = Column("x", dtype, shape, "ndarray" if shape else "scalar")
            values = (rng.normal(size=(7, *shape)) * 50).astype(dtype)
            found = decode(unischema_of([column]).fields[0], cell_codec.encode(column, values))
            assert found.dtype == values.dtype
            np.testing.assert_array_equal(found, values)


def test_common_metadata_is_read_back(tmp_path):
    arrow = pa.schema([("a", pa.int32())], metadata={"own": "kept"})
    row_groups = {"part-0.parquet": 3, "day=1/part-1.parquet": 0}
    write_common_metadata(str(tmp_path), arrow, unischema=REAL, row_groups_per_file=row_groups)
    found = pq.read_schema(tmp_path / "_common_metadata")
    assert found.names == ["a"]
    assert found.metadata[b"own"] == b"kept"
    assert read_unischema(found.metadata[UNISCHEMA_KEY]) == REAL
    assert json.loads(found.metadata[ROW_GROUPS_KEY]) == row_groups


@pytest.mark.parametrize("row_groups", [{"../x": 1}, {"/x": 1}, {"x": -1}, {"x": 1.0}, {"x": True}])
def test_row_groups_outside_the_folder_or_not_whole_are_refused(row_groups):
    with pytest.raises(ValueError, match="x"):
        common_metadata(REAL, row_groups)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("part.parquet", {}),
        ("a=1/b=x%20y%2Fz/part.parquet", {"a": "1", "b": "x y/z"}),
        ("a%3Db=c=d/part=3.parquet", {"a=b": "c=d"}),
        ("plain/a=/f", {"a": ""}),
        ("a=__HIVE_DEFAULT_PARTITION__/f", {"a": "__HIVE_DEFAULT_PARTITION__"}),
    ],
)
def test_partitions_of_a_path(path, expected):
    assert hive_partitions(path) == expected


@pytest.mark.parametrize("path", ["../a=1/f", "a=1/../f", "%2e%2e/f", "/a=1/f", "a=1//f", "a=1/.", "", "a=1\\..\\f",
                                  "a=%00/f", "a=1/a=2/f"])  # fmt: skip
def test_paths_outside_the_folder_are_refused(path):
    with pytest.raises(ValueError, match="path inside|twice"):
        hive_partitions(path)


# --- Cells ---


def test_arrays_of_any_dtype_and_shape_are_decoded():
    rng = np.random.default_rng(3)
    for _ in range(150):
        dtype, rows = str(rng.choice(NUMBERS)), int(rng.integers(0, 5))
        shape = tuple(int(n) for n in rng.integers(0, 4, size=int(rng.integers(0, 4))))
        values = (rng.normal(size=(rows, *shape)) * 20).astype(dtype)
        for codec, encode in ((NDARRAY, npy), (ZIPPED, npz)):
            field = Field("x", dtype, shape, codec)
            stored = cells(b"before", *map(encode, values), b"after")[1 : rows + 1]
            for column in (stored, pa.chunked_array([stored[:1], stored[1:]]), stored.cast(pa.large_binary())):
                found = decode(field, column)
                assert found.dtype == values.dtype
                np.testing.assert_array_equal(found, values)


class Cycle:
    """Is freed by the garbage collector, which lets other threads run meanwhile."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(1e-5)


def test_threads_that_read_headers_at_the_same_time_do_not_disturb_each_other():
    """Headers of their own, as one that was read before is not parsed again."""
    stored = [(cells(*[npy(np.ones((i, 3)))] * 2), cells(npy(np.ones(i)), npy(np.ones(i + 300)))) for i in range(250)]
    errors = []

    def read():
        try:
            for i, (alike, other) in enumerate(stored):
                Cycle()
                assert len(decode(Field("x", "float64", (i, 3), NDARRAY), alike)) == 2
                assert len(decode(Field("x", "float64", (None,), NDARRAY), other)) == 2
        except BaseException as error:
            errors.append(error)

    threshold = gc.get_threshold()
    gc.set_threshold(5)  # also in the middle of a header
    try:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    assert errors == []


def test_cells_that_are_alike_are_a_view_of_the_buffer():
    stored = cells(*(npy(np.full((2, 3), i, "float32")) for i in range(4)))
    found = decode(Field("x", "float32", (2, 3), NDARRAY), stored)
    data = np.frombuffer(stored.buffers()[2], np.uint8)
    assert np.shares_memory(found, data)
    assert not found.flags.writeable


VALUES = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("odd", [np.asfortranarray(VALUES), VALUES.astype(">f8")])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_other_orders_of_axes_and_bytes_are_decoded(odd, version):
    field = Field("x", "float64", (2, 3), NDARRAY)
    for others in ([], [npy(odd, version)], [npy(VALUES)]):  # alone, alike, and mixed
        found = decode(field, cells(npy(odd, version), *others))
        assert found.dtype == np.dtype("float64")
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, [VALUES] * len(found))


@pytest.mark.parametrize("codec", [NDARRAY, ZIPPED])
@pytest.mark.parametrize(("dtype", "values"), [("str", ["a", "größer"]), ("bytes", [b"x", b"yz\xff"])])
def test_arrays_of_text_are_decoded_at_any_width(codec, dtype, values):
    encode = npy if codec is NDARRAY else npz
    stored = cells(encode(np.array(values)), encode(np.array(values[:1] * 2)))
    found = decode(Field("x", dtype, (2,), codec), stored)
    assert found.tolist() == [values, values[:1] * 2]
    found = decode(Field("x", dtype, (None,), codec), stored)
    assert [c.tolist() for c in found] == [values, values[:1] * 2]


def test_shapes_that_vary_and_nulls_give_a_list():
    ragged = [np.zeros((0, 2), "int16"), np.ones((3, 2), "int16")]
    found = decode(Field("x", "int16", (None, 2), NDARRAY), cells(*map(npy, ragged)))
    assert isinstance(found, list)
    assert [c.shape for c in found] == [(0, 2), (3, 2)]
    field = Field("x", "int16", (3, 2), NDARRAY, nullable=True)
    found = decode(field, cells(npy(ragged[1]), None))
    assert found[1] is None
    np.testing.assert_array_equal(found[0], ragged[1])
    assert isinstance(decode(field, cells(npy(ragged[1]))), np.ndarray)  # none is null


@pytest.mark.parametrize(
    ("field", "cell", "message"),
    [
        (Field("x", "int8", (2,), NDARRAY), None, "null, expected no nulls"),
        (Field("x", "int8", (2,), NDARRAY), npy(np.zeros(3, "int8")), r"shape \(3,\).*\(2,\)"),
        (Field("x", "int8", (None, 2), NDARRAY), npy(np.zeros((2, 3), "int8")), r"shape \(2, 3\)"),
        (Field("x", "int8", (2,), NDARRAY), npy(np.zeros((1, 2), "int8")), r"shape \(1, 2\)"),
        (Field("x", "int8", (2,), NDARRAY), npy(np.zeros(2, "uint8")), "dtype uint8.*int8"),
        (Field("x", "str", (2,), NDARRAY), npy(np.array([b"a", b"b"])), "dtype"),
        (Field("x", "int8", (2,), NDARRAY), npy(np.zeros(2, "int8"))[:-1], "cannot be read"),
        (Field("x", "int8", (2,), NDARRAY), b"", "cannot be read"),
        (Field("x", "int8", (None,), NDARRAY), npy_header((-1,)) + b"12", r"cannot be read .*\(-1,\)"),
        (Field("x", "int8", (2,), NDARRAY), pickle.dumps([1, 2]), "cannot be read"),
        (Field("x", "int8", (2,), ZIPPED), npy(np.zeros(2, "int8")), "cannot be read"),
        (Field("x", "int8", (2,), ZIPPED), npz(np.zeros(3, "int8")), "shape"),
        (Field("x", "uint8", (2, 2), Codec("image", "png")), b"\x89PNG", "cannot be read"),
    ],
)
def test_bad_cells_are_named(field, cell, message):
    good = {NDARRAY: npy, ZIPPED: npz}.get(field.codec)
    dtype = {"str": "U1"}.get(field.dtype, field.dtype)
    first = good(np.zeros([n or 2 for n in field.shape], dtype)) if good else png(np.zeros((2, 2), "uint8"))
    with pytest.raises(ValueError, match=f"'x', row 1: .*{message}"):
        decode(field, cells(first, cell))
    with pytest.raises(ValueError, match=f"'x', row 0: .*{message}"):
        decode(field, cells(cell))


@pytest.mark.parametrize("codec", [NDARRAY, ZIPPED])
def test_S01_pickles_in_cells_are_not_loaded(tmp_path, codec):
    canary = tmp_path / "canary"
    array = np.array([CALLS["os.system"](canary)], dtype=object)
    stored = cells(npy(array) if codec is NDARRAY else npz(array))
    for dtype in ("object", "int8", "decimal"):
        with pytest.raises(ValueError, match="'x', row 0"):
            decode(Field("x", dtype, (1,), codec), stored)
    with pytest.raises(ValueError, match="not loaded"):
        decode(Field("x", "object", (), scalar("BinaryType")), cells(pickle.dumps(array)))
    assert not canary.exists()


@pytest.mark.parametrize("header", [b"{[]: 1}", b"'''", b"(" * 3000, b"{1: 2, 'a': 3}", b" x\n y", b" " * 20_000])
def test_headers_that_are_none_are_named(header):
    cell = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
    for field in (Field("x", "int8", (2,), NDARRAY), Field("x", "int8", (None,), NDARRAY)):
        with pytest.raises(ValueError, match="field 'x', row 0: found a cell that cannot be read .*header"):
            decode(field, cells(cell, cell))


def test_a_header_of_the_third_version_is_read():
    found = decode(Field("x", "float64", (2, 3), NDARRAY), cells(npy(VALUES, (3, 0)), npy(VALUES)))
    np.testing.assert_array_equal(found, [VALUES] * 2)


def commented(cell, comment=b"words"):
    file = io.BytesIO(cell)
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = comment
    return file.getvalue()


@pytest.mark.parametrize("change", [commented, lambda c: b"before" + c, lambda c: c])
def test_what_archives_unpack_to_is_what_is_read(change):
    cell = change(npz(np.zeros(1000)))
    assert npy_cells.unpacked_bytes(pa.array([cell, None, cell])) == 2 * len(npy(np.zeros(1000)))
    field = Field("x", "float64", (1000,), ZIPPED)
    np.testing.assert_array_equal(decode(field, cells(cell)), np.zeros((1, 1000)))
    empty = commented(cell, b"PK\5\6" + b"\0" * 18)  # which looks like the end of an archive without files
    assert npy_cells.unpacked_bytes(pa.array([empty])) == 0
    with pytest.raises(ValueError, match="row 0: found a cell that cannot be read"):
        decode(field, cells(empty))


def test_cells_that_promise_more_than_they_hold_are_refused(monkeypatch):
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match="row 0: .*cannot be read"):
        decode(Field("x", "float64", (None,), NDARRAY), cells(file.getvalue()))
    monkeypatch.setattr(npy_cells, "_MAX_CELL_BYTES", 10_000)
    with pytest.raises(ValueError, match="row 0: .*10000"):
        decode(Field("x", "float64", (None,), ZIPPED), cells(npz(np.zeros(10_000))))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("other.npy", npy(1))
    with pytest.raises(ValueError, match=r"row 0: .*arr\.npy"):
        decode(Field("x", "float64", (None,), ZIPPED), cells(archive.getvalue()))


# --- Images ---


def png(pixels, filters=(0,)):
    """A PNG file of gray levels or RGB, 8 or 16 bits. # filters: of the lines, in turn: 0 none, 1 left, 2 up"""
    depth, color = pixels.dtype.itemsize * 8, 2 if pixels.ndim == 3 else 0
    step = pixels.dtype.itemsize * (3 if color else 1)
    lines = np.frombuffer(pixels.astype(pixels.dtype.newbyteorder(">")).tobytes(), np.uint8).reshape(len(pixels), -1)
    data, above = b"", np.zeros_like(lines[0])
    for i, line in enumerate(lines):
        kind = filters[i % len(filters)]
        left = np.concatenate([np.zeros(step, np.uint8), line[:-step]])
        data += bytes([kind]) + (line - (0, left, above)[kind]).astype(np.uint8).tobytes()
        above = line
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, color, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    body = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 7), (1, 1, 3), (1, 1)])
def test_png_images_are_decoded(dtype, shape):
    values = np.random.default_rng(4).integers(0, np.iinfo(dtype).max, (3, *shape), dtype=dtype, endpoint=True)
    stored = cells(*(png(v, filters=(0, 1, 2)) for v in values))
    found = decode(Field("x", dtype, shape, Codec("image", "png")), stored)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)
    varying = decode(Field("x", dtype, (None, *shape[1:]), Codec("image", "png")), stored)
    np.testing.assert_array_equal(varying[2], values[2])


def test_a_deep_image_of_opencv_is_read_as_rgb():
    written = (  # by Petastorm's CompressedImageCodec, from the array below
        "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACEAIAAACtREYwAAAAIklEQVQIHWNkYJBLtDnEqMOow6jDyPxCydNhFZMOow6jDgA+FQTPVdms1QAA"
        "AABJRU5ErkJggg=="
    )
    found = decode(Field("x", "uint16", (2, 2, 3), Codec("image", "png")), cells(base64.b64decode(written)))
    assert found[0].tolist() == [[[0, 7777, 15554], [300, 8077, 15854]], [[1000, 8777, 16554], [1300, 9077, 16854]]]


def test_jpeg_images_are_decoded():
    image = pytest.importorskip("PIL.Image")
    y, x = np.mgrid[:32, :48]
    for pixels in (np.stack([y * 4, x * 4, y + x], axis=-1).astype("uint8"), (y * 4 + x).astype("uint8")):
        file = io.BytesIO()
        image.fromarray(pixels).save(file, "JPEG", quality=95)
        found = decode(Field("x", "uint8", pixels.shape, Codec("image", "jpeg", 95)), cells(file.getvalue()))
        assert found.dtype == np.uint8
        assert np.abs(found[0].astype(int) - pixels).max() < 16  # red stays red


@pytest.mark.parametrize(
    ("field", "pixels"),
    [
        (Field("x", "uint8", (3, 2), Codec("image", "png")), np.zeros((2, 2), "uint8")),
        (Field("x", "uint8", (2, 2, 3), Codec("image", "png")), np.zeros((2, 2), "uint8")),
        (Field("x", "uint8", (2, 2), Codec("image", "png")), np.zeros((2, 2), "uint16")),
        (Field("x", "uint16", (2, 2, 3), Codec("image", "png")), np.zeros((2, 2, 3), "uint8")),
    ],
)
def test_images_of_other_shapes_or_depths_are_named(field, pixels):
    with pytest.raises(ValueError, match="'x', row 0"):
        decode(field, cells(png(pixels)))


def test_files_that_are_other_images_are_not_opened():
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("L", (2, 2)).save(file, "GIF")
    with pytest.raises(ValueError, match="'x', row 0"):
        decode(Field("x", "uint8", (2, 2), Codec("image", "gif")), cells(file.getvalue()))


# --- Scalars ---


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        ("uint8", pa.array([0, 255], pa.int16()), [0, 255]),
        ("uint32", pa.array([2**32 - 1], pa.int64()), [2**32 - 1]),
        ("int64", pa.array(["5", "-7"]), [5, -7]),
        ("bool", pa.array([True, False]), [True, False]),
        ("float32", pa.array([0.1, float("inf")], pa.float64()), [np.float32(0.1), np.inf]),
        ("float16", pa.array([0.5], pa.float32()), [0.5]),
        ("float64", pa.array([decimal.Decimal("1.50")]), [1.5]),
        ("int32", pa.array([], pa.int32()), []),
        ("int32", pa.array([7, 7]).dictionary_encode(), [7, 7]),
    ],
)
def test_numbers_are_cast_to_the_dtype_of_the_field(dtype, stored, expected):
    found = decode(Field("x", dtype, (), scalar("LongType")), stored)
    assert found.dtype == dtype
    assert found.tolist() == expected
    assert decode(Field("x", dtype), stored).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("uint8", pa.array([1, 256], pa.int16())),
        ("uint8", pa.array([1, -1], pa.int16())),
        ("int64", pa.array(["1", "x"])),
        ("int32", pa.array([1.0, 1.5])),
        ("decimal", pa.array(["1", "x"])),
        ("str", cells(b"a", b"\xff")),
        ("bytes", pa.array([1, 2])[1:].cast(pa.int64())),
    ],
)
def test_values_that_the_dtype_cannot_hold_are_named(dtype, stored):
    with pytest.raises(ValueError, match=f"'x', row {len(stored) - 1}: .*expected"):
        decode(Field("x", dtype), stored)
    with pytest.raises(ValueError, match=f"'x', row {len(stored)}: .*expected"):
        decode(Field("x", dtype, nullable=True), pa.concat_arrays([pa.nulls(1, stored.type), stored]))


def test_nulls_of_scalars():
    found = decode(Field("x", "int8", nullable=True), pa.array([1, None, 3], pa.int16()))
    assert [None if c is None else (c.dtype.name, c.shape, int(c)) for c in found] == [
        ("int8", (), 1), None, ("int8", (), 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'x', row 1: found null"):
        decode(Field("x", "int8"), pa.array([1, None, 3], pa.int8()))


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        ("str", pa.array(["a", None, "ß"]), ["a", None, "ß"]),
        ("str", cells("ß".encode(), None), ["ß", None]),
        ("bytes", pa.array(["ß", None]), ["ß".encode(), None]),
        ("bytes", cells(b"\xff", None), [b"\xff", None]),
        ("decimal", pa.array([decimal.Decimal("1.50"), None]), [decimal.Decimal("1.50"), None]),
        ("decimal", pa.array(["1.50"]), [decimal.Decimal("1.50")]),
    ],
)
def test_text_and_decimals_are_objects(dtype, stored, expected):
    found = decode(Field("x", dtype, nullable=True), stored)
    assert found.dtype == object
    assert list(found) == expected


def test_times_keep_their_unit_and_other_types_are_refused():
    found = decode(Field("x", "datetime64"), pa.array([0, 1], pa.timestamp("us")))
    assert found.dtype == "datetime64[us]"
    with pytest.raises(ValueError, match="'x'.*int64.*datetime64"):
        decode(Field("x", "datetime64"), pa.array([0]))
    with pytest.raises(ValueError, match="'x'.*complex64"):
        decode(Field("x", "complex64"), pa.array([0.0]))
    with pytest.raises(ValueError, match="'x'.*binary cells"):
        decode(Field("x", "int8", (2,), NDARRAY), pa.array([0]))


def test_lists_without_a_codec():
    stored = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32()))
    found = decode(Field("x", "int64", (2,)), stored)
    assert found.dtype == "int64"
    assert found.tolist() == [[1, 2], [3, 4]]
    ragged = decode(Field("x", "str", (None,), nullable=True), pa.array([["a"], None, []], pa.list_(pa.string())))
    assert [None if c is None else c.tolist() for c in ragged] == [["a"], None, []]
    with pytest.raises(ValueError, match="'x', row 1: .*shape"):
        decode(Field("x", "int32", (2,)), pa.array([[1, 2], [3]], pa.list_(pa.int32())))
    with pytest.raises(ValueError, match="'x', row 0: .*null inside"):
        decode(Field("x", "int32", (2,)), pa.array([[1, None]], pa.list_(pa.int32())))
    with pytest.raises(ValueError, match="lists of one axis"):
        decode(Field("x", "int32", (2,)), pa.array([1]))


# --- Datasets that old versions of Petastorm wrote ---

LEGACY = {  # of all values, as Petastorm 0.13.1 itself reads them
    "0.4.0": "dfbb507256bb7ad077dd428dd88921259c8f8e315552139c65c252837ee50715",
    "0.7.6": "c50eac065c588c8c66f2ceeffcfa5c06ec5f7c2ddf00c91f1e25ed02f47eff18",
}


def digest(rows):
    total = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            value = row[name]
            plain = f"{value.dtype.str}{value.shape}".encode() + np.asarray(value).tobytes() if hasattr(
                value, "dtype") else str(value).encode()  # fmt: skip
            total.update(name.encode() + b"\0" + plain + b"\0")
    return total.hexdigest()


@pytest.mark.parametrize("version", LEGACY)
def test_datasets_of_old_versions_are_read_as_petastorm_reads_them(version):
    folder = os.environ.get("SPARK_DL_TEST_DATA")
    if not folder or not (Path(folder) / "petastorm_legacy" / version).is_dir():
        pytest.skip("SPARK_DL_TEST_DATA names no folder with petastorm_legacy/ (data/legacy of Petastorm's own tests)")
    unischema, rows = read_dataset(Path(folder) / "petastorm_legacy" / version)
    assert unischema.name == "TestSchema"
    assert len(unischema.fields) == {"0.4.0": 13, "0.7.6": 17}[version]
    assert [int(r["id"]) for r in rows] == list(range(100))
    for row in rows:
        assert row["partition_key"] == f"p_{row['id'] // 10}"
        assert row["id2"] == row["id"] % 2
    assert digest(rows) == LEGACY[version]
    assert read_unischema(write_unischema(unischema)) == unischema


@pytest.mark.parametrize("stored", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())])])
def test_a_column_of_another_kind_than_its_field_is_an_error_without_rows_too(stored):
    with pytest.raises(ValueError, match=r"field 'x': a column of .* cannot become int64"):
        decode(Field("x", "int64", (), None), pa.array([], stored))


@pytest.mark.parametrize("dtype", ["object", "decimal", "bytes", "str"])
@pytest.mark.parametrize(("shape", "codec"), [((), None), ((3,), None), ((3,), Codec("ndarray"))])
def test_fields_that_no_tensor_can_be_are_refused(dtype, shape, codec):
    says = "has type list<item: string>" if (dtype, codec) == ("str", Codec("ndarray")) else (
        rf"has dtype {dtype}, shape \({'3,' if shape else ''}\) and the codec {codec.kind if codec else 'scalar'} of"
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"column 'x' {says}"):
        petastorm_column(Field("x", dtype, shape, codec), {})
