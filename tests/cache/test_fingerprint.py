"""A fingerprint is equal exactly where every bit of the request that can matter is, on any machine."""

from __future__ import annotations

import string

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mcp_client.cache.fingerprint import fingerprint, to_text
from mcp_client.errors import InvalidInputError

X = np.array([[0.1, 0.9, 0.4]], np.float32)
BIG = np.arange(150_528, dtype=np.float32).reshape(1, 3, 224, 224)
WORDS = np.array([b"", b"a\0", "é".encode(), b"\xff"], object)

# Written down once, checked for ever: spools, disk caches and profiles of other machines hold these.
GOLDEN = {
    "tiny": ("m", "", {"x": X}, (), {}, "bbfdmgf3aoxkmqd6jvjmuo4zf5cjwjhc"),
    "versioned": ("m", "3", {"x": X}, ("probs",), {}, "gmb2b7t6ntv37jcxoakyecr3qlesd3ac"),
    "parameters": (
        "m",
        "",
        {"x": X},
        (),
        {"a": True, "b": 1, "c": 1.0, "d": "1"},
        "tuodylrcy7oeizhjrfbizxwgtsmkubse",
    ),
    "two inputs": (
        "m",
        "",
        {"b": X, "a": np.int64(7) + np.zeros((), np.int64)},
        (),
        {},
        "bx7bge77bzbyl7euipabkvkqnucsmkhi",
    ),
    "large": ("resnet50", "1", {"data": BIG}, (), {}, "atm2cbbsrm2kl4rbsisg3a62cf4plbyb"),
    "bytes": ("m", "", {"words": WORDS}, (), {}, "7g3konhp2z4vasamu2sr5kptg23xia6h"),
    "empty": ("m", "", {"x": np.zeros((0, 3), np.float64)}, (), {}, "ojvjvna6juvcaobybnidd3nvg3z3hijl"),
    "bf16": (
        "m",
        "",
        {"x": np.array([1.5, -0.0], ml_dtypes.bfloat16)},
        (),
        {},
        "knrxhiyjesiwyedk5hobmbkrc4agt47p",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_values_hold(name: str) -> None:
    *request, expected = GOLDEN[name]
    assert to_text(fingerprint(*request)) == expected


def test_it_is_20_bytes_and_32_characters_of_text() -> None:
    fp = fingerprint("m", "", {"x": X})
    assert len(fp) == 20
    assert len(to_text(fp)) == 32
    assert set(to_text(fp)) <= set(string.ascii_lowercase + "234567")


@pytest.mark.parametrize("array", [X, BIG], ids=["tiny", "large"])
def test_memory_layout_and_byte_order_do_not_matter(array: np.ndarray) -> None:
    same = fingerprint("m", "", {"x": array})
    strided = np.repeat(array, 2, axis=-1)[..., ::2]
    read_only = array.copy()
    read_only.flags.writeable = False
    for other in (np.asfortranarray(array), array.astype(">f4"), strided, read_only, array[::1]):
        assert fingerprint("m", "", {"x": other}) == same


@given(
    hnp.arrays(
        st.sampled_from([np.dtype(d) for d in ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8")]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
)
def test_any_array_equals_its_own_copies_in_other_layouts(array: np.ndarray) -> None:
    same = fingerprint("m", "", {"x": array})
    assert fingerprint("m", "", {"x": np.array(array, order="F")}) == same
    assert fingerprint("m", "", {"x": array.astype(array.dtype.newbyteorder(">"))}) == same


def test_kinds_of_strings_are_one_datatype() -> None:
    objects = np.array([b"ab", b"c"], object)
    same = fingerprint("m", "", {"x": objects})
    assert fingerprint("m", "", {"x": np.array([b"ab", b"c"])}) == same
    assert fingerprint("m", "", {"x": np.array(["ab", "c"])}) == same
    assert fingerprint("m", "", {"x": np.array(["ab", b"c"], object)}) == same


def different(*requests: tuple) -> None:
    assert len({fingerprint(*request) for request in requests}) == len(requests)


def test_names_shapes_and_datatypes_are_part_of_it() -> None:
    flat = np.arange(6, dtype=np.float32)
    different(
        ("m", "", {"x": flat}),
        ("n", "", {"x": flat}),
        ("m", "1", {"x": flat}),
        ("m", "", {"y": flat}),
        ("m", "", {"x": flat.reshape(2, 3)}),
        ("m", "", {"x": flat.reshape(3, 2)}),
        ("m", "", {"x": flat.reshape(1, 6)}),
        ("m", "", {"x": flat.view(np.int32)}),
        ("m", "", {"x": flat.astype(np.float64)}),
        ("m", "", {"x": flat}, ("a", "b")),
        ("m", "", {"x": flat}, ("b", "a")),
        ("m", "", {"x": flat}, ("ab",)),
    )


def test_every_bit_of_a_number_counts() -> None:
    quiet, payload = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    different(*[("m", "", {"x": np.array([value], np.float32)}) for value in (0.0, -0.0, quiet, payload)])


def test_nothing_runs_into_its_neighbour() -> None:
    a, b = np.array([b"ab", b"c"], object), np.array([b"a", b"bc"], object)
    different(("m", "", {"x": a}), ("m", "", {"x": b}), ("m", "", {"x": np.array([b"abc"], object)}))
    different(("ab", "c", {"x": X}), ("a", "bc", {"x": X}))
    one, two = np.array([1], np.uint8), np.array([2], np.uint8)
    different(("m", "", {"x": one, "y": two}), ("m", "", {"x": two, "y": one}))


def test_a_parameters_type_is_part_of_it() -> None:
    values = [True, 1, 1.0, "1", False, 0, 0.0, -0.0, "", 2**70]
    different(*[("m", "", {"x": X}, (), {"p": value}) for value in values], ("m", "", {"x": X}))


def test_the_order_of_inputs_and_parameters_does_not_matter() -> None:
    y = np.ones(3)
    assert fingerprint("m", "", {"x": X, "y": y}) == fingerprint("m", "", {"y": y, "x": X})
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert fingerprint("m", "", {"x": X}, (), one) == fingerprint("m", "", {"x": X}, (), other)


def test_what_has_no_fingerprint_says_so() -> None:
    with pytest.raises(InvalidInputError, match="complex64"):
        fingerprint("m", "", {"x": X.astype(np.complex64)})
    with pytest.raises(InvalidInputError, match="parameter 'p' must be"):
        fingerprint("m", "", {"x": X}, (), {"p": None})  # type: ignore[dict-item]
