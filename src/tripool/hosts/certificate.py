"""A certificate that all hosts derive from one token: who shows it, and can sign with its key, knows the token.

TLS needs a key pair on both sides. This makes the same one everywhere, from 32 secret bytes, with nothing but Python:
an elliptic curve key (P-256) and a certificate that it signs itself. OpenSSL does the rest; what is written here runs
once per process, on secrets of this host alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_A = _P - 3
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
"""The curve P-256 (FIPS 186-4, D.1.2.3): field, coefficient, order, generator."""
_Point = tuple[int, int] | None
_EC_KEY = bytes.fromhex("06072a8648ce3d0201")
_P256 = bytes.fromhex("06082a8648ce3d030107")
_ECDSA_SHA256 = bytes.fromhex("06082a8648ce3d040302")
_COMMON_NAME = bytes.fromhex("0603550403")
_BASIC_CONSTRAINTS = bytes.fromhex("0603551d13")


def self_signed(secret: bytes) -> tuple[str, str]:
    """Certificate and private key as PEM, the same for the same 32 bytes."""
    d = int.from_bytes(hashlib.sha512(b"tripool-key" + secret).digest(), "big") % (_N - 1) + 1
    public = _encoded(_times(d, _G))
    algorithm = _der(0x30, _ECDSA_SHA256)
    name = _der(0x30, _der(0x31, _der(0x30, _COMMON_NAME + _der(0x0C, b"tripool"))))
    # Far beyond any clock that is merely wrong: time is no part of what this certificate says.
    validity = _der(0x30, _der(0x17, b"700101000000Z") + _der(0x18, b"21991231235959Z"))
    key_info = _der(0x30, _der(0x30, _EC_KEY + _P256) + _der(0x03, b"\0" + public))
    constraints = _der(0x30, _BASIC_CONSTRAINTS + _der(0x01, b"\xff") + _der(0x04, _der(0x30, _der(0x01, b"\xff"))))
    body = _der(
        0x30,
        _der(0xA0, _number(2)) + _number(1) + algorithm + name + validity + name + key_info
        + _der(0xA3, _der(0x30, constraints)),
    )  # fmt: skip
    certificate = _der(0x30, body + algorithm + _der(0x03, b"\0" + _sign(d, body)))
    private = _der(
        0x30,
        _number(1) + _der(0x04, d.to_bytes(32, "big")) + _der(0xA0, _P256) + _der(0xA1, _der(0x03, b"\0" + public)),
    )
    return _pem("CERTIFICATE", certificate), _pem("EC PRIVATE KEY", private)


def _sign(d: int, data: bytes) -> bytes:
    """ECDSA over SHA-256. The nonce is derived from key and data, so that it never repeats for other data."""
    digest = hashlib.sha256(data).digest()
    e, counter = int.from_bytes(digest, "big"), 0
    while True:
        seed = hmac.digest(d.to_bytes(32, "big"), digest + bytes([counter]), "sha512")
        k = int.from_bytes(seed, "big") % (_N - 1) + 1
        point = _times(k, _G)
        assert point is not None
        r = point[0] % _N
        s = pow(k, -1, _N) * (e + r * d) % _N
        if r and s:
            return _der(0x30, _number(r) + _number(s))
        counter += 1


def _plus(one: _Point, two: _Point) -> _Point:
    if one is None or two is None:
        return one or two
    (x1, y1), (x2, y2) = one, two
    if x1 == x2 and (y1 + y2) % _P == 0:
        return None
    slope = (3 * x1 * x1 + _A) * pow(2 * y1, -1, _P) if one == two else (y2 - y1) * pow(x2 - x1, -1, _P)
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _times(k: int, point: _Point) -> _Point:
    total: _Point = None
    while k:
        total = _plus(total, point) if k & 1 else total
        point, k = _plus(point, point), k >> 1
    return total


def _encoded(point: _Point) -> bytes:
    assert point is not None
    return b"\x04" + point[0].to_bytes(32, "big") + point[1].to_bytes(32, "big")


def _number(value: int) -> bytes:
    return _der(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 128 + len(length)]) + length + content


def _pem(kind: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    lines = "\n".join(text[start : start + 64] for start in range(0, len(text), 64))
    return f"-----BEGIN {kind}-----\n{lines}\n-----END {kind}-----\n"
