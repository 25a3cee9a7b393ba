"""Bytes have units, in what is printed and in what is read."""

import pytest

from kvpolicy.errors import KVPolicyError
from kvpolicy.quantities import exact_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_bytes_have_the_largest_fitting_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 TiB", 3 * 2**39),
        ("2kb", 2000),
        ("2kib", 2048),
        ("4096", 4096),
        ("17 B", 17),
        ("0.001MB", 1000),
    ],
)
def test_bytes_have_units(text: str, num_bytes: int) -> None:
    assert parse_bytes("--memory", text) == num_bytes


@pytest.mark.parametrize(
    "text", ["8G", "", "GiB", "-1GB", "1e9", "8 PiB", "0", "0.1B", "8GiBs", "٣GB", "9" * 40, "nan"]
)
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(KVPolicyError, match="--memory"):
        parse_bytes("--memory", text)


@pytest.mark.parametrize("text", ["8GiB", "500MB", "256KiB", "17B", "3kB"])
def test_bytes_are_printed_as_they_are_typed(text: str) -> None:
    assert exact_bytes(parse_bytes("--bytes", text)) in (text, text.replace("k", "K"))
