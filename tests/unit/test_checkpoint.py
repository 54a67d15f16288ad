"""Headers and layouts: what is written is read back, and no byte string does anything but parse or be refused."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.checkpoint import (
    BITS,
    PREFIX_BYTES,
    TensorIndex,
    TensorSpec,
    carried_over,
    encode_header,
    encode_index,
    header_bytes,
    parse_header,
    shards,
    span,
)
from quantmint.errors import ReleaseError

WHOLE = sorted(dtype for dtype, bits in BITS.items() if bits % 8 == 0)
NAMES = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=20)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        NAMES.filter(lambda name: name != "__metadata__"),
        st.sampled_from(WHOLE),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


def parsed(shard):
    return parse_header(shard.header, file=shard.file, size=shard.size)


@given(SPECS, st.integers(1, 200))
def test_what_is_laid_out_is_read_back(specs, limit):
    made = shards(specs, limit)
    headers = [parsed(shard) for shard in made]
    index = TensorIndex.of(headers, encode_index(made) if len(made) > 1 else None)
    assert {(entry.name, entry.dtype, entry.shape) for entry in index.tensors.values()} == {
        (spec.name, spec.dtype, spec.shape) for spec in specs
    }
    assert index.nbytes == sum(spec.nbytes for spec in specs)
    for shard in made:
        payload = shard.size - len(shard.header)
        assert payload <= limit or len(shard.tensors) == 1 or payload == max(spec.nbytes for spec in shard.tensors)


@given(SPECS, st.integers(1, 200))
def test_headers_and_indexes_are_plain_json(specs, limit):
    made = shards(specs, limit)
    for shard in made:
        text = shard.header[8:]
        compact = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False).encode()
        assert text == compact + b" " * (-len(compact) % 8)
    index = json.loads(encode_index(made))
    assert index["weight_map"] == {spec.name: shard.file for shard in made for spec in shard.tensors}
    if specs:
        assert encode_index(made).decode() == json.dumps(index, indent=2, ensure_ascii=False) + "\n"


@given(SPECS)
def test_every_tensor_is_aligned_to_its_elements(specs):
    for shard in shards(specs, 10**9):
        assert len(shard.header) % 8 == 0
        for entry in parsed(shard).tensors:
            if entry.nbytes:
                assert entry.begin % (BITS[entry.dtype] // 8) == 0


def outcome(data: bytes):
    """The header of a whole file, or the error that refuses it."""
    try:
        length = header_bytes(data[:PREFIX_BYTES], file="f", size=len(data))
        return parse_header(data[:length], file="f", size=len(data))
    except ReleaseError as error:
        return error


@given(st.binary(max_size=200))
def test_random_bytes_parse_or_are_refused(data):
    for candidate in (data, struct.pack("<Q", len(data)) + data):
        found = outcome(candidate)
        if isinstance(found, ReleaseError):
            assert found.code in ("CORRUPT_SHARD", "LFS_POINTER")
            assert found.file == "f"
        else:
            length = header_bytes(candidate, file="f", size=len(candidate))
            assert sum(entry.nbytes for entry in found.tensors) == len(candidate) - length


@given(SPECS.filter(bool), st.data())
def test_a_changed_header_never_covers_other_bytes(specs, data):
    good = encode_header(specs)
    payload = bytes(sum(spec.nbytes for spec in specs))
    position = data.draw(st.integers(8, len(good) - 1))
    bad = good[:position] + bytes([data.draw(st.integers(0, 255))]) + good[position + 1 :]
    found = outcome(bad + payload)
    if isinstance(found, ReleaseError):
        assert found.code == "CORRUPT_SHARD"
    else:
        assert sum(entry.nbytes for entry in found.tensors) == len(payload)


def test_the_layout_has_one_metadata_key_and_the_usual_names():
    made = shards([TensorSpec("a", "F32", (2,)), TensorSpec("b", "U8", (8,))], 8)
    assert [shard.file for shard in made] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert dict(parsed(made[0]).metadata) == {"format": "pt"}
    assert shards([TensorSpec("a", "F32", (2,))], 8)[0].file == "model.safetensors"
    assert json.loads(encode_index(made)) == {
        "metadata": {"total_size": 16},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }


def test_spans_of_packed_dtypes():
    assert span("F4", (2, 4)) == 4
    assert span("F6_E2M3", (4,)) == 3
    assert span("BF16", ()) == 2
    with pytest.raises(ValueError, match="whole bytes"):
        span("F4", (3,))


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("tokenizer.json", True), ("chat_template.jinja", True), ("generation_config.json", True), ("LICENSE", True),
        ("LICENSE.md", True), ("license-apache.txt", True), ("NOTICE", True), ("README.md", False),
        ("config.json", False),
        ("model.safetensors", False), ("modeling_laguna.py", False), (".gitattributes", False), ("licensed.bin", False),
    ],
)  # fmt: skip
def test_what_is_carried_over(name, carried):
    assert carried_over(name) is carried
