"""Harm done to bytes: cut, padded, bits flipped, tokens and numbers swapped."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def mutated(draw: st.DrawFn, body: bytes) -> bytes:
    """A few mutations in a row: cut, pad, flip a bit, replace a byte by one that means something to JSON,
    swap a number."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(body) - 1)))
        kind = draw(st.sampled_from(["cut", "pad", "flip", "token", "number", "double"]))
        if kind == "cut":
            body = body[:at]
        elif kind == "pad":
            body += draw(st.binary(min_size=1, max_size=8))
        elif kind == "flip" and body:
            body = body[:at] + bytes([body[at] ^ 1 << draw(st.integers(0, 7))]) + body[at + 1 :]
        elif kind == "token" and body:
            token = draw(
                st.sampled_from([b"null", b"[", b"]", b"{}", b'"', b"-1", b"true", b"NaN", b"1e999", b","])
            )
            body = body[:at] + token + body[at + draw(st.integers(0, 3)) :]
        elif kind == "number":
            digits = [i for i, byte in enumerate(body) if 48 <= byte <= 57]
            if digits:
                at = draw(st.sampled_from(digits))
                number = draw(
                    st.sampled_from(
                        [b"0", b"9223372036854775808", b"4294967296", b"-7", b"1.5", b"99999999999999999999"]
                    )
                )
                body = body[:at] + number + body[at + 1 :]
        else:
            body = body[:at] + body[at : at + 20] + body[at:]
    return body
