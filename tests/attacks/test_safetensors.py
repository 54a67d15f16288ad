"""One test for each attack on a weight file or its index; each must be refused, and by name."""

from __future__ import annotations

import json
import struct

import pytest

from quantmint.checkpoint import MAX_HEADER_BYTES, PREFIX_BYTES, TensorIndex, header_bytes, parse_header, weight_map
from quantmint.errors import ReleaseError

FILE = "model.safetensors"


def raw(header: object, payload: bytes = b"", *, text: str | None = None) -> bytes:
    encoded = (json.dumps(header) if text is None else text).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded + payload


def described(begin: int, end: int, shape: tuple[int, ...] = (2, 2), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def parse(data: bytes, *, file: str = FILE, size: int | None = None):
    whole = len(data) if size is None else size
    return parse_header(data[: header_bytes(data[:PREFIX_BYTES], file=file, size=whole)], file=file, size=whole)


def refused(data: bytes, *, code: str = "CORRUPT_SHARD", size: int | None = None) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        parse(data, size=size)
    assert caught.value.code == code
    assert caught.value.file == FILE
    assert caught.value.exit_code == 6
    return caught.value


def test_a_sound_file_is_read():
    header = parse(raw({"__metadata__": {"format": "pt"}, "a": described(0, 16)}, bytes(16)))
    assert [(entry.name, entry.shape, entry.nbytes) for entry in header.tensors] == [("a", (2, 2), 16)]
    assert dict(header.metadata) == {"format": "pt"}


def test_lfs_pointer():
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
    error = refused(pointer, code="LFS_POINTER")
    assert "4976698672" in str(error.expected)


def test_overlong_header():
    error = refused(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", size=2 * MAX_HEADER_BYTES)
    assert str(MAX_HEADER_BYTES + 1) in str(error.actual)


def test_header_length_that_wraps_around():
    refused(struct.pack("<Q", 2**64 - 1) + b"{}")


def test_header_longer_than_its_file():
    refused(struct.pack("<Q", 1000) + b"{}")


def test_empty_file():
    refused(b"")


def test_empty_header():
    refused(struct.pack("<Q", 0))


def test_header_that_is_no_object():
    refused(raw(["a"]))


def test_header_that_does_not_begin_with_a_brace():
    refused(raw(None, text=' {"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'))


def test_header_that_is_not_utf8():
    refused(struct.pack("<Q", 6) + b'{"\xff"}')


def test_duplicate_tensor_name():
    one = json.dumps(described(0, 16))
    error = refused(raw(None, bytes(16), text=f'{{"a":{one},"a":{one}}}'))
    assert error.actual == "DUPLICATE_KEY"


def test_duplicate_key_in_a_description():
    refused(raw(None, bytes(16), text='{"a":{"dtype":"F32","dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'))


def test_unknown_key_in_a_description():
    refused(raw({"a": {**described(0, 16), "strides": [2, 1]}}, bytes(16)))


def test_missing_key_in_a_description():
    refused(raw({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)))


def test_unknown_dtype():
    refused(raw({"a": described(0, 16, dtype="F128")}, bytes(16)))


def test_dtype_that_is_no_text():
    refused(raw({"a": described(0, 16, dtype=["F32"])}, bytes(16)))


def test_float_for_integer_offset():
    refused(raw(None, bytes(16), text='{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16.0]}}'))


def test_float_for_integer_extent():
    refused(raw(None, bytes(16), text='{"a":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}}'))


def test_boolean_extent():
    refused(raw(None, bytes(4), text='{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}'))


def test_negative_extents_whose_product_fits():
    refused(raw({"a": described(0, 16, (-2, -2))}, bytes(16)))


def test_negative_offset():
    refused(raw({"a": described(-16, 0)}, bytes(16)))


def test_descending_offsets():
    refused(raw({"a": described(16, 0)}, bytes(16)))


def test_extents_whose_product_overflows_64_bits():
    refused(raw({"a": described(0, 0, (2**32, 2**32))}))


def test_extent_beyond_exact_integers():
    refused(raw({"a": described(0, 0, (2**70, 0))}))


def test_integer_of_ten_thousand_digits():
    refused(raw(None, text=f'{{"a":{{"dtype":"F32","shape":[{"9" * 10_000}],"data_offsets":[0,0]}}}}'))


def test_too_many_axes():
    refused(raw({"a": described(0, 4, (1,) * 9)}, bytes(4)))


def test_shape_that_lies_about_its_span():
    error = refused(raw({"a": described(0, 4, (1000, 1000))}, bytes(4)))
    assert "4000000 bytes" in str(error.expected)


def test_packed_elements_that_do_not_fill_bytes():
    refused(raw({"a": described(0, 2, (3,), "F4")}, bytes(2)))


def test_overlapping_tensors():
    error = refused(raw({"a": described(0, 16), "b": described(8, 24)}, bytes(24)))
    assert "overlaps" in error.message


def test_two_tensors_in_one_place():
    refused(raw({"a": described(0, 16), "b": described(0, 16)}, bytes(16)))


def test_hole_between_tensors():
    error = refused(raw({"a": described(0, 16), "b": described(24, 40)}, bytes(40)))
    assert "hole" in error.message


def test_hole_before_the_first_tensor():
    refused(raw({"a": described(8, 24)}, bytes(24)))


def test_truncated_file():
    error = refused(raw({"a": described(0, 16)}, bytes(9)))
    assert "truncated" in error.message


def test_surplus_bytes_behind_the_last_tensor():
    error = refused(raw({"a": described(0, 16)}, bytes(17)))
    assert "surplus" in error.message


def test_deep_nesting():
    refused(raw(None, text='{"a":' + "[" * 100_000 + "]" * 100_000 + "}"))


def test_metadata_that_is_no_text():
    refused(raw({"__metadata__": {"format": 1}, "a": described(0, 16)}, bytes(16)))


def test_metadata_that_is_no_object():
    refused(raw({"__metadata__": "pt", "a": described(0, 16)}, bytes(16)))


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00b", "\u202ea", "x" * 2000])
def test_illegal_tensor_name(name):
    refused(raw({name: described(0, 16)}, bytes(16)))


def test_lone_surrogate_in_a_tensor_name():
    refused(raw({"\ud800": described(0, 16)}, bytes(16)))


def test_header_cut_between_reading_and_parsing():
    data = raw({"a": described(0, 16)}, bytes(16))
    with pytest.raises(ReleaseError, match="read whole"):
        parse_header(data[:20], file=FILE, size=len(data))


# --- the index ---


def shard(file: str, *names: str):
    table = {name: described(16 * n, 16 * n + 16) for n, name in enumerate(names)}
    return parse(raw(table, bytes(16 * len(names))), file=file)


def index(**places: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": places}).encode()


def index_refused(headers, raw_index: bytes | None, kind: str) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        TensorIndex.of(headers, raw_index)
    assert caught.value.code == "CORRUPT_SHARD"
    assert kind in caught.value.message
    return caught.value


def test_missing_shard():
    error = index_refused([shard("1.safetensors", "a")], index(a="1.safetensors", b="2.safetensors"), "MISSING_SHARD")
    assert error.file == "2.safetensors"


def test_unlisted_shard():
    index_refused(
        [shard("1.safetensors", "a"), shard("2.safetensors", "b")], index(a="1.safetensors"), "UNLISTED_SHARD"
    )


def test_ghost_tensor():
    error = index_refused([shard("1.safetensors", "a")], index(a="1.safetensors", b="1.safetensors"), "GHOST_TENSOR")
    assert "b" in error.message


def test_tensor_in_another_shard_than_the_index_says():
    headers = [shard("1.safetensors", "a"), shard("2.safetensors", "b")]
    index_refused(headers, index(a="2.safetensors", b="1.safetensors"), "GHOST_TENSOR")


def test_unlisted_tensor():
    index_refused([shard("1.safetensors", "a", "b")], index(a="1.safetensors"), "UNLISTED_TENSOR")


def test_duplicate_tensor_across_shards():
    headers = [shard("1.safetensors", "a"), shard("2.safetensors", "a", "b")]
    index_refused(headers, index(a="1.safetensors", b="2.safetensors"), "DUPLICATE_TENSOR")


def test_several_shards_without_an_index():
    index_refused([shard("1.safetensors", "a"), shard("2.safetensors", "b")], None, "MISSING_INDEX")


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "sub/1.safetensors", "", "C:\\x"])
def test_index_that_leaves_its_folder(place):
    with pytest.raises(ReleaseError) as caught:
        weight_map(index(a=place))
    assert caught.value.code == "CORRUPT_SHARD"


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"weight_map":[]}', b'{"weight_map":{"a":1}}', b"not JSON", b"\xff"])
def test_index_that_is_none(text):
    with pytest.raises(ReleaseError) as caught:
        weight_map(text)
    assert caught.value.code == "CORRUPT_SHARD"


def test_index_with_a_duplicate_tensor():
    with pytest.raises(ReleaseError) as caught:
        weight_map(b'{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}')
    assert caught.value.actual == "DUPLICATE_KEY"
