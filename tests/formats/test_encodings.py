"""All 28 encodings, to the byte, and clear errors for values that they do not take."""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from lightning_stream.formats.encodings import Encoding, encoding_names, get_encoding, register_encoding
from lightning_stream.formats.model import Schema
from lightning_stream.formats.rows import RowEncoder
from lightning_stream.formats.shard import DECODE_ERRORS

PLAIN = {"int", "bool", "NoneType", "dict", "float"}
NAMES = {
    "bytes", "str", "int", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
    "float32", "float64", "str_int", "str_float", "str_decimal", "ndarray", "pil", "jpeg", "png", "jpeg_array",
    "jpegarray", "list[pil]", "list[jpeg]", "list[png]", "json", "pkl",
}  # fmt: skip


def value_of(about: dict[str, Any]) -> Any:
    kind = about["t"]
    if kind == "bytes":
        return bytes.fromhex(about["hex"])
    if kind == "str":
        return about["v"]
    if kind in PLAIN:
        return eval(about["repr"], {"nan": float("nan"), "inf": float("inf")})  # noqa: S307 - our own golden file
    if kind == "decimal":
        return Decimal(about["repr"])
    if kind == "list":
        return [value_of(item) for item in about["items"]]
    if kind in ("ndarray", "npscalar"):
        flat = np.frombuffer(bytes.fromhex(about["hex"]), about["dtype"])
        return flat.reshape(about["shape"]) if kind == "ndarray" else flat[0]
    return about


def has_images(value: Any) -> bool:
    return (
        has_images(value[0])
        if isinstance(value, list) and value
        else isinstance(value, dict) and value.get("t") == "image"
    )


def agrees(got: Any, want: Any) -> bool:
    if isinstance(want, dict) and want.get("t") == "image":
        pixels = hashlib.sha256(got.tobytes()).hexdigest()
        return (type(got).__name__, got.mode, list(got.size), pixels) == (
            want["class"], want["mode"], want["size"], want["sha256"],
        )  # fmt: skip
    if isinstance(want, list):
        return len(got) == len(want) and all(map(agrees, got, want))
    if isinstance(want, np.ndarray):
        return (
            got.dtype == want.dtype
            and got.shape == want.shape
            and got.tobytes() == want.tobytes()
            and got.flags.writeable
        )
    if isinstance(want, np.generic):
        return type(got) is type(want) and got.tobytes() == want.tobytes()
    return type(got) is type(want) and repr(got) == repr(want)


def test_every_golden_case_is_encoded_and_decoded_exactly(shared_golden: Path) -> None:
    cases = json.loads((shared_golden / "encodings.json").read_text())
    assert len(cases) == 160
    for case in cases:
        encoding = get_encoding(case["encoding"])
        value, data = value_of(case["input"]), bytes.fromhex(case["hex"] or "")
        assert encoding.size == case["fixed_size"]
        if not has_images(value):
            encoded = value if isinstance(value, bytes) else encoding.encode(value)
            assert (len(encoded), hashlib.sha256(encoded).hexdigest()) == (case["n"], case["sha256"]), case["encoding"]
            data = data or encoded
        for given_as in (data, memoryview(data)):
            assert agrees(encoding.decode(given_as), value_of(case["decoded"])), (case["encoding"], case["decoded"])


@pytest.mark.parametrize("name", ["ndarray", "ndarray:int16"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 300)])
def test_empty_arrays_come_back(name: str, shape: tuple[int, ...]) -> None:
    back = get_encoding(name).decode(get_encoding(name).encode(np.zeros(shape, np.int16)))
    assert agrees(back, np.zeros(shape, np.int16))


def test_pil_warns_that_it_does_not_store_a_palette() -> None:
    photo = Image.effect_noise((9, 7), 90).convert("RGB").quantize(16)
    with pytest.warns(UserWarning, match=r"mode 'P'.*colours are lost.*convert"):
        stored = get_encoding("pil").encode(photo)
    assert get_encoding("pil").decode(stored).tobytes() == photo.tobytes()


def test_there_are_28_encodings() -> None:
    assert set(encoding_names()) >= NAMES
    assert len(NAMES) == 28


@pytest.mark.parametrize(
    "image",
    [
        Image.effect_noise((9, 7), 90).convert(mode)
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F")
    ],
    ids=lambda image: image.mode,
)
def test_images_of_every_mode_come_back_from_pil(image: Image.Image) -> None:
    back = get_encoding("pil").decode(get_encoding("pil").encode(image))
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())
    (one,) = get_encoding("list[pil]").decode(get_encoding("list[pil]").encode([image]))
    assert one.tobytes() == image.tobytes()


def jpeg_bytes(size: tuple[int, int] = (40, 30)) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(out, format="JPEG", quality=91)
    return out.getvalue()


def test_an_image_opened_from_a_jpeg_file_keeps_its_bytes_unless_it_was_changed(tmp_path: Path) -> None:
    data, jpeg = jpeg_bytes(), get_encoding("jpeg")
    (tmp_path / "a.jpg").write_bytes(data)
    with Image.open(tmp_path / "a.jpg") as image:
        assert jpeg.encode(image) == data
        image.load()
        assert jpeg.encode(image) == data
        image.thumbnail((20, 20))
        assert jpeg.decode(jpeg.encode(image)).size == (20, 15)
    with Image.open(io.BytesIO(data)) as image:
        assert jpeg.encode(image) == data


def test_lists_of_images_take_images_or_their_bytes() -> None:
    data = jpeg_bytes()
    for name in ("jpeg_array", "jpegarray", "list[jpeg]"):
        encoding = get_encoding(name)
        decoded = encoding.decode(encoding.encode([data, Image.open(io.BytesIO(data))]))
        assert [image.size for image in decoded] == [(40, 30), (40, 30)]
        assert encoding.decode(encoding.encode([])) == []


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"])
def test_big_endian_arrays_keep_their_numbers(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(f">{dtype}")
    native = array.astype(f"<{dtype}")
    for name in ("ndarray", f"ndarray:{native.dtype.name}", f"ndarray:{native.dtype.name}:2,3"):
        encoding = get_encoding(name)
        assert encoding.encode(array) == encoding.encode(native)
        assert np.array_equal(encoding.decode(encoding.encode(array)), array)
        assert np.array_equal(encoding.decode(encoding.encode(array[:, ::-1][::-1].copy()[::-1, ::-1])), array)


class Tensor:
    """What offers ``__array__``, as tensors of any library do."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self._array


def test_tensors_with_gradients_are_stored_and_kinds_that_numpy_lacks_are_refused() -> None:
    torch = pytest.importorskip("torch")
    encode = get_encoding("ndarray").encode
    assert encode(torch.ones(2, requires_grad=True)) == encode(np.ones(2, np.float32))
    for name in ("ndarray", "ndarray:float32:2"):
        with pytest.raises(TypeError, match=rf"{name} takes numbers of numpy; got .*Tensor of torch.bfloat16"):
            get_encoding(name).encode(torch.ones(2, dtype=torch.bfloat16))


def test_tensors_are_taken_through_array() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for name in ("ndarray", "ndarray:float32", "ndarray:float32:2,3"):
        assert get_encoding(name).encode(Tensor(array)) == get_encoding(name).encode(array)
    assert get_encoding("int").encode(Tensor(np.array(7))) == (7).to_bytes(8, "little")
    assert get_encoding("float32").encode(Tensor(np.array(0.5))) == np.float32(0.5).tobytes()


@given(
    hnp.arrays(
        st.sampled_from(["u1", "i2", "f2", "u4", "i8", "f8"]).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=5, max_side=300).filter(lambda shape: np.prod(shape) < 3000),
    )
)
def test_any_array_comes_back(array: np.ndarray[Any, Any]) -> None:
    dims = ",".join(map(str, array.shape))
    for name in ("ndarray", f"ndarray:{array.dtype.name}", f"ndarray:{array.dtype.name}:{dims}"):
        back = get_encoding(name).decode(get_encoding(name).encode(array))
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.tobytes() == array.tobytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.integers(), st.floats(), st.decimals(allow_nan=False), st.text(), st.binary())
def test_any_plain_value_comes_back(
    value: Any, number: int, real: float, decimal: Decimal, text: str, data: bytes
) -> None:
    cases = {"json": value, "str_int": number, "str_decimal": decimal, "str": text, "bytes": data}
    for name, one in cases.items():
        assert get_encoding(name).decode(get_encoding(name).encode(one)) == one
    assert repr(get_encoding("str_float").decode(get_encoding("str_float").encode(real))) == repr(real)


def outcome(decode: Any, data: bytes) -> str:
    try:
        return repr(decode(data))
    except DECODE_ERRORS as error:
        return type(error).__name__


JSON_TEXTS = [
    b"NaN", b"[-Infinity, 1]", b"1E400", b"-0", b"-0.0", b"1" * 400, b"1e-400", b"18446744073709551616", b'"\\ud800"',
    b'"\\ud83d\\ude00"', b'{"a": 1, "b": 2, "a": 3}', b'"\x01"', b'"\xff"', b'"\xed\xa0\x80"', b"\xef\xbb\xbf1", b"01",
    b"1.", b"[1,]", b'{"a": 1,}', b"1 2", b"\x0c1", b"", b"\xa01", b'"\\x"', b"2.2250738585072011e-308",
    b"[" * 500 + b"]" * 500,
]  # fmt: skip


@pytest.mark.parametrize("data", JSON_TEXTS)
def test_json_is_read_as_python_reads_it(data: bytes) -> None:
    assert outcome(get_encoding("json").decode, data) == outcome(lambda text: json.loads(str(text, "utf-8")), data)


@given(JSON | st.floats(), st.booleans(), st.integers(0, 99), st.binary(max_size=2))
def test_any_json_is_read_as_python_reads_it(value: Any, ascii_only: bool, at: int, damage: bytes) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    for text in (data, data[:at] + damage + data[at + 1 :]):
        assert outcome(get_encoding("json").decode, text) == outcome(lambda x: json.loads(str(x, "utf-8")), text)


@pytest.mark.parametrize("name", ["int", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"])
def test_whole_numbers_are_stored_up_to_their_limits_and_refused_beyond(name: str) -> None:
    encoding = get_encoding(name)
    limits = np.iinfo("int64" if name == "int" else name)
    for number in (limits.min, limits.max):
        assert encoding.decode(encoding.encode(int(number))) == number
        assert encoding.encode(np.array(number, limits.dtype)[()]) == encoding.encode(int(number))
    for number in (int(limits.min) - 1, int(limits.max) + 1):
        with pytest.raises(ValueError, match=f"out of range for {name}"):
            encoding.encode(number)
    assert encoding.encode(3.0) == encoding.encode(3)
    with pytest.raises(TypeError, match=f"{name} takes a whole number; got float 3.5"):
        encoding.encode(3.5)


LARGE = Decimal("1E+400")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("float16", 1e6), ("float32", 1e300), ("float64", 10**400)),
        *(("float64", LARGE), ("float64", -LARGE), ("float32", np.array(LARGE)), ("float16", Decimal(70000))),
    ],
)
def test_floats_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"out of range for {name}"):
        get_encoding(name).encode(value)


@pytest.mark.parametrize("value", [LARGE, np.finfo(np.longdouble).max])
def test_a_finite_number_is_never_stored_as_an_infinite_one(value: Any) -> None:
    if value <= sys.float_info.max:
        pytest.skip("NumPy's long double is a double here")
    infinite = type(value)("inf")
    for name in ("float16", "float32", "float64", "str_float"):
        encoding = get_encoding(name)
        assert encoding.decode(encoding.encode(infinite)) == math.inf
        with pytest.raises(ValueError, match=f"{name}"):
            encoding.encode(value)
    with pytest.raises(TypeError, match="column 'x': float takes float; got"):
        RowEncoder(Schema("json", ("x",), ("float",), (None,))).encode({"x": value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bytes", "text", "bytes takes bytes; got str 'text'"),
        ("str", 3, "str takes str; got int 3"),
        ("int", "3", "int takes a whole number; got str '3'"),
        ("int", None, "int takes a whole number; got NoneType"),
        ("float32", "0.5", "float32 takes a number; got str"),
        ("float64", 1j, "float64 takes a number; got complex"),
        ("str_int", 1.5, "str_int takes a whole number; got float 1.5"),
        ("str_float", "x", "str_float takes a number; got str"),
        ("str_decimal", 1.5, "str_decimal takes decimal.Decimal; got float"),
        ("json", object(), "json takes a JSON value; got object"),
        ("ndarray", [1, 2], "ndarray takes a numpy array, or what offers __array__; got list"),
        ("ndarray", np.array(3), "1 to 32 dimensions; got shape"),
        ("ndarray", np.zeros(2, bool), "ndarray takes arrays of uint8, .*; got dtype bool"),
        ("ndarray", np.zeros(2, complex), "got dtype complex128"),
        ("ndarray", np.array(["a"]), "got dtype <U1"),
        ("ndarray:int32", np.zeros(2), "takes dtype int32; got dtype float64. Convert it with astype"),
        ("ndarray:int32:2", np.zeros(2), "takes dtype int32; got dtype float64"),
        ("ndarray:int32:2", np.zeros(3, np.int32), r"takes shape \(2,\); got shape \(3,\)"),
        ("pil", np.zeros((2, 2)), "pil takes a PIL image, or the encoded bytes; got numpy.ndarray|got ndarray"),
        ("jpeg", "path.jpg", "jpeg takes a PIL image"),
        ("jpeg", Image.new("RGBA", (2, 2)), "jpeg cannot store mode 'RGBA'"),
        ("list[png]", Image.new("L", (2, 2)), r"list\[png\] takes a sequence of images; got PIL.Image.Image"),
        ("list[jpeg]", [3], "jpeg takes a PIL image"),
        (
            "jpeg",
            b"GIF89a..",
            r"jpeg takes the bytes of a JPEG or PNG file, .*; got 8 bytes that begin with b'GIF89a\.\.'",
        ),
        (
            "png",
            b"",
            "png takes the bytes of a JPEG or PNG file, .*Write the opened image, which is then stored as PNG",
        ),
        ("jpeg_array", [b"no image"], "jpeg takes the bytes of a JPEG or PNG file"),
        ("list[png]", [b"BM"], "png takes the bytes of a JPEG or PNG file"),
    ],
)
def test_wrong_values_say_what_was_expected_and_what_was_found(name: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        get_encoding(name).encode(value)


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "int:3",
        "ndarray:bool",
        "ndarray:int32:0",
        "ndarray:int32:2:3",
        "ndarray:int32:a",
        "ndarray:int8:4294967296",
    ],
)
def test_unknown_encodings_say_what_exists(name: str) -> None:
    with pytest.raises(ValueError, match=r"use register_encoding|ndarray takes|at least 1|under 4 GiB"):
        get_encoding(name)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("int", b"123"), ("float32", b""), ("str", b"\xff"), ("str_int", b"x"), ("str_decimal", b"x"), ("json", b"{"),
        ("json", b"[" * 100_000), ("ndarray", b""), ("ndarray", b"\x63\x04\x01a"), ("ndarray", b"\x21\x04\x02abcd"),
        ("ndarray", b"\x21\xff" + b"\xff" * 20), ("ndarray:int32", b"\x07" + b"\xff" * 8), ("pil", b"\0" * 11),
        ("pil", b"\xff" * 12), ("pil", b"\xff\xff\0\0\xff\xff\0\0\x03\0\0\0RGBabc"),
        ("pil", b"\1\0\0\0\1\0\0\0\1\0\0\0Zaaaa"),
        ("list[pil]", b"\0\0\0\0\xff\xff\xff\xff"), ("list[png]", b"\1\0\0\0\0\0\0\0"),
        ("jpeg_array", b"\2\0\0\0\1\0\0\0\1\0\0\0a"),
    ],
)  # fmt: skip
def test_damaged_bytes_raise_what_readers_expect(name: str, data: bytes) -> None:
    with pytest.raises(DECODE_ERRORS):
        get_encoding(name).decode(data)


def test_a_pair_of_functions_is_an_encoding() -> None:
    register_encoding(
        "complex",
        encode=lambda v: np.complex128(v).tobytes(),
        decode=lambda b: complex(np.frombuffer(b, "c16")[0]),
        size=16,
    )
    encoding = get_encoding("complex")
    assert (encoding.size, encoding.safe, encoding.decode(encoding.encode(2 + 1j))) == (16, True, 2 + 1j)
    with pytest.raises(ValueError, match="encoding 'complex' exists"):
        register_encoding("complex", encode=bytes, decode=bytes)
    register_encoding("complex", encode=bytes, decode=bytes, replace=True)
    assert get_encoding("complex").size is None


def test_an_encoding_object_is_registered_by_name() -> None:
    class Upper(Encoding):
        def encode(self, value: Any) -> bytes:
            return str(value).upper().encode()

        def decode(self, data: bytes | memoryview) -> str:
            assert isinstance(data, bytes)
            return data.decode()

    upper = Upper()
    register_encoding("upper", upper)
    assert get_encoding("upper") is upper
    assert "upper" in encoding_names()
    for wrong in ("a:b", ""):
        with pytest.raises(ValueError, match="hold no ':'"):
            register_encoding(wrong, upper)
    with pytest.raises(TypeError, match="both encode= and decode="):
        register_encoding("half", encode=bytes)
    with pytest.raises(TypeError, match="must have encode, decode, size, safe"):
        register_encoding("none", object())  # type: ignore[arg-type]


def test_packages_offer_encodings_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from lightning_stream.formats import encodings

    point = EntryPoint("hexed", "tests_hexed:Hexed", encodings.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        encodings, "entry_points", lambda group: [point] if group == encodings.ENTRY_POINT_GROUP else []
    )

    class Hexed(Encoding):
        def encode(self, value: Any) -> bytes:
            return value.hex().encode()

        def decode(self, data: bytes | memoryview) -> bytes:
            return bytes.fromhex(str(data, "ascii"))

    monkeypatch.setattr(EntryPoint, "load", lambda self: Hexed)
    assert "hexed" in encoding_names()
    assert get_encoding("hexed").decode(get_encoding("hexed").encode(b"abc")) == b"abc"


def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from lightning_stream.formats import encodings

    points = [EntryPoint("gone", place, encodings.ENTRY_POINT_GROUP) for place in ("no_such_module:X", "json:nothing")]
    for point in points:
        monkeypatch.setattr(encodings, "entry_points", lambda group, point=point: [point])
        with pytest.raises(ValueError, match=f"'gone' is offered by the entry point '{point.value}', which cannot be"):
            get_encoding("gone")
