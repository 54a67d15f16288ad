"""Documents: strict frozen models, canonical JSON, and parsers that refuse what they do not fully understand.

Authored documents (`Document`) are closed: an unknown key is an error with a suggestion. Received documents
(`Received`) are open: unknown fields are ignored, and only their original bytes may ever be hashed or signed.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import rfc8785
from pydantic import BaseModel, ConfigDict, ValidationError

from quantmint.errors import ReleaseError

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 4_000_000
"""Values of a document, unless a caller says less. A tensor of a weight file's header takes about eight."""


class Document(BaseModel):
    """A closed, strict, frozen model: what we author or produce."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; fields that are None are left out."""
        return self.model_dump(mode="json", exclude_none=True, by_alias=True)

    def canonical(self) -> bytes:
        """RFC 8785 bytes of `as_json()`."""
        return canonical(self.as_json())


class Received(BaseModel):
    """An open, strict, frozen model of somebody else's document. Keep the bytes it came from."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


D = TypeVar("D", bound=BaseModel)


def canonical(value: Json) -> bytes:
    """RFC 8785 (JSON Canonicalization Scheme) bytes of `value`; integers beyond 2^53-1 and non-finite are refused."""
    return rfc8785.dumps(value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ReleaseError("DUPLICATE_KEY", f"the key {twice[:80]!r} stands twice in one object")
    return found


def _no_constant(text: str) -> Any:
    raise ReleaseError("MALFORMED_DOCUMENT", f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ReleaseError("MALFORMED_DOCUMENT", f"the number {text[:40]} is too large")
    return value


def parse_json(data: bytes, *, file: str, limit: int = MAX_DOCUMENT_BYTES, values: int = MAX_VALUES) -> Any:
    """Parse hostile JSON: UTF-8, at most `limit` bytes and `MAX_DEPTH` levels, no duplicate keys, all numbers finite.

    A value costs up to about 100 bytes of memory however short it is written, so a document that could hold more than
    `values` is refused before it is parsed: each value but one follows a bracket or a comma, and these are counted
    (also those inside strings).

    Raises:
        ReleaseError: MALFORMED_DOCUMENT or DUPLICATE_KEY, naming `file`.
    """
    if len(data) > limit:
        raise ReleaseError(
            "MALFORMED_DOCUMENT",
            "document too large",
            file=file,
            expected=f"at most {limit} bytes",
            actual=f"{len(data)}",
        )
    marks = sum(data.count(mark) for mark in (b"[", b"{", b","))
    if marks > values:
        raise ReleaseError(
            "MALFORMED_DOCUMENT",
            "document of too many values",
            file=file,
            expected=f"at most {values} brackets and commas",
            actual=f"{marks}",
        )
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except ReleaseError as error:
        raise ReleaseError(error.code, error.message, file=file) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ReleaseError("MALFORMED_DOCUMENT", f"not valid JSON: {error}", file=file) from None
    except RecursionError:
        raise ReleaseError("MALFORMED_DOCUMENT", "nested too deeply", file=file) from None
    if _depth(value) > MAX_DEPTH:
        raise ReleaseError("MALFORMED_DOCUMENT", f"nested deeper than {MAX_DEPTH} levels", file=file)
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return depth
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, (list, tuple)):
                below.extend(item)
        level = below
    return depth


def receive(model: type[D], data: bytes, *, file: str, limit: int = MAX_DOCUMENT_BYTES, values: int = MAX_VALUES) -> D:
    """Parse `data` as a received document, within the bounds of `parse_json`.

    Raises:
        ReleaseError: MALFORMED_DOCUMENT or DUPLICATE_KEY.
    """
    parse_json(data, file=file, limit=limit, values=values)
    return _received(model, data, file)


def receive_value(model: type[D], value: Any, *, file: str) -> D:
    """Validate a part of a document that `parse_json` or `receive` has let through; see `receive`."""
    return _received(model, json.dumps(value), file)


def _received(model: type[D], text: str | bytes, file: str) -> D:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise ReleaseError("MALFORMED_DOCUMENT", f"{where}: {first['msg']}", file=file) from None


def author(model: type[D], text: str, *, file: str, syntax: Literal["toml", "json"] = "toml") -> D:
    """Parse an authored document, with one clear error that names the key and, for a typo, the nearest known key.

    Raises:
        ReleaseError: RECIPE_SYNTAX, DUPLICATE_KEY (of JSON), UNKNOWN_KEY or INVALID_VALUE, naming `file`.
    """
    try:
        value = tomllib.loads(text) if syntax == "toml" else json.loads(text, object_pairs_hook=_no_duplicates)
    except ReleaseError as error:
        raise ReleaseError(error.code, error.message, file=file) from None
    except ValueError as error:
        raise ReleaseError("RECIPE_SYNTAX", f"not valid {syntax.upper()}: {error}", file=file) from None
    except RecursionError:
        raise ReleaseError("RECIPE_SYNTAX", "nested too deeply", file=file) from None
    return author_value(model, value, file=file)


def author_value(model: type[D], value: Any, *, file: str) -> D:
    """Validate plain values as an authored document; see `author`.

    Values that have no canonical form are refused here, also where the schema allows anything: dates, NaN and
    infinities, integers beyond 2^53-1.
    """
    if _depth(value) > MAX_DEPTH:
        raise ReleaseError("RECIPE_SYNTAX", f"nested deeper than {MAX_DEPTH} levels", file=file)
    try:
        canonical(value)
    except ValueError as error:  # rfc8785's own, an unencodable string, or an integer too long to be shown
        raise ReleaseError("INVALID_VALUE", f"a value cannot be kept: {str(error)[:200]}", file=file) from None
    try:
        return model.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise _explained(model, error, file) from None


def _explained(model: type[BaseModel], error: ValidationError, file: str) -> ReleaseError:
    problems = error.errors()
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = sorted(_known_keys(model, first["loc"][:-1]))
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        suggestion = f"; did you mean {near[0]!r}?" if near else ""
        return ReleaseError(
            "UNKNOWN_KEY", f"unknown key {where!r}{suggestion}", file=file, expected=", ".join(known), actual=where
        )
    shown = repr(first.get("input"))
    return ReleaseError(
        "INVALID_VALUE", f"{where or 'document'}: {first['msg']}", file=file, expected=first["msg"], actual=shown[:120]
    )


def _known_keys(model: type[BaseModel], loc: Sequence[int | str]) -> set[str]:
    """Keys that the object at `loc` may have, found in the JSON Schema of `model`."""
    schema = model.model_json_schema(by_alias=True)
    defs = schema.get("$defs", {})
    nodes = [schema]
    for part in (*loc, None):
        opened: list[dict[str, Any]] = []
        for node in nodes:
            opened.extend(_resolve(node, defs))
        if part is None:
            return {key for node in opened for key in node.get("properties", {})}
        below: list[dict[str, Any]] = []
        for node in opened:
            if isinstance(part, int):
                items = node.get("items")
                below.extend([items] if isinstance(items, dict) else [])
            elif part in node.get("properties", {}):
                below.append(node["properties"][part])
            elif isinstance(node.get("additionalProperties"), dict):
                below.append(node["additionalProperties"])
        nodes = below or opened
    return set()


def _resolve(node: dict[str, Any], defs: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _resolve(defs[node["$ref"].rsplit("/", 1)[-1]], defs)
    branches = [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]
    return [leaf for branch in branches for leaf in _resolve(branch, defs)] or [node]


def json_schema(model: type[BaseModel], identifier: str) -> bytes:
    """The JSON Schema (draft 2020-12) of `model`, pretty and stable, with `$id` = `identifier`."""
    schema = model.model_json_schema(by_alias=True)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": identifier, **schema}
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
